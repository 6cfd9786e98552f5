// Replays one stored launch (debug.py: write_launch) so that gdb can step through the kernel.
// Compiled with -DEMU_KERNELS='EMU_ENTRY(name) ...'.
#include "core.h"

#include <string>
#include <vector>

#include <sys/mman.h>

#define EMU_ENTRY(K) extern "C" int emu_launch_##K(emu::Launch *, void **);
EMU_KERNELS
#undef EMU_ENTRY

static FILE *file;
template <class T> static T get() {
  T v;
  if (fread(&v, sizeof v, 1, file) != 1) { fprintf(stderr, "the launch file is cut short\n"); exit(2); }
  return v;
}
static void get_bytes(void *p, size_t n) {
  if (n && fread(p, n, 1, file) != 1) { fprintf(stderr, "the launch file is cut short\n"); exit(2); }
}

int main(int argc, char **argv) {
  file = argc == 2 ? fopen(argv[1], "rb") : nullptr;
  if (!file) { fprintf(stderr, "usage: replay KERNEL.launch\n"); return 2; }
  char magic[8];
  get_bytes(magic, 8);
  if (memcmp(magic, "tkemu001", 8)) { fprintf(stderr, "not a launch file\n"); return 2; }
  emu::Launch l{};
  emu::Failure failure{};
  for (unsigned &n : l.grid) n = get<uint32_t>();
  for (unsigned &n : l.block) n = get<uint32_t>();
  l.dyn_bytes = get<uint64_t>();
  l.order = get<int32_t>(); l.seed = get<uint32_t>(); l.cooperative = get<int32_t>(); l.check = get<int32_t>(); l.async_late = get<int32_t>();
  std::vector<std::string> names(get<uint32_t>());
  std::vector<emu::Range> ranges(names.size());
  std::vector<uint64_t> old(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    names[i].resize(get<uint32_t>());
    get_bytes(&names[i][0], names[i].size());
    ranges[i].elem_bits = get<uint32_t>();
    old[i] = get<uint64_t>();
    ranges[i].size = get<uint64_t>();
    // Where it was, if possible: the same alignment, and as far from the other tensors.
    size_t in_page = old[i] % 4096;
    void *hint = reinterpret_cast<void *>(old[i] - in_page);
    void *p = mmap(hint, in_page + ranges[i].size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { fprintf(stderr, "no memory for %s\n", names[i].c_str()); return 2; }
    ranges[i].base = static_cast<char *>(p) + in_page;
    get_bytes(ranges[i].base, ranges[i].size);
    ranges[i].name = names[i].c_str();
  }
  std::vector<std::vector<char>> values(get<uint32_t>());
  std::vector<void *> args;
  for (auto &v : values) {
    v.resize(get<uint32_t>());
    get_bytes(v.data(), v.size());
    uint64_t p = 0;
    if (v.size() >= 8) memcpy(&p, v.data(), 8);     // a tensor, or the base of a tensor map
    for (size_t i = 0; i < old.size(); ++i)
      if (v.size() >= 8 && p && p == old[i]) memcpy(v.data(), &ranges[i].base, 8);
    args.push_back(v.data());
  }
  l.num_ranges = int(ranges.size()); l.ranges = ranges.data(); l.failure = &failure;
  std::string kernel = argv[1];
  kernel = kernel.substr(kernel.rfind('/') + 1);
  kernel = kernel.substr(0, kernel.rfind('.'));
#define EMU_ENTRY(K) if (kernel == #K) { \
    if (emu_launch_##K(&l, args.data())) { printf("%s: %s\n", #K, failure.text); return 1; } \
    printf("%s: %llu blocks, %llu barriers\n", #K, (unsigned long long)l.blocks, (unsigned long long)l.barriers); return 0; }
  EMU_KERNELS
  fprintf(stderr, "no kernel named %s\n", kernel.c_str());
  return 2;
}
