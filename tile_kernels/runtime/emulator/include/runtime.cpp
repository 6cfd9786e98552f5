// The emulator's runtime: CUDA threads are fibers, one block at a time (or all of a cooperative grid), one OS thread.
//
// Reading order: state, failing, clocks and shadow memory (what "ordered" means), the access check, fibers and the
// scheduler, barriers, warp operations, asynchronous copies, launch.
#define EMU_RUNTIME
#include "core.h"

#include <algorithm>
#include <random>
#include <unordered_map>
#include <vector>

#include <execinfo.h>
#include <link.h>
#include <sys/mman.h>

#include <cstdarg>

uint3 threadIdx, blockIdx, blockDim, gridDim;

// Saves the callee-saved registers on the old stack and continues on the new one.
extern "C" void emu_switch(void **save, void *load);
#if defined(__x86_64__)
asm(".text\n.hidden emu_switch\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n"
    ".size emu_switch,.-emu_switch\n");
#else
#error "the fiber switch is written for x86-64 only"
#endif

namespace emu {

// ---- state ---------------------------------------------------------------------------------------------------------
// Address space per thread; only touched pages are real. Not a power of two, or the tops of all stacks would share
// one cache set and every switch would miss.
constexpr size_t kStack = (256 << 10) + 4096 + 192;
constexpr uint64_t kCanary = 0x5afe57ac5afe57acull;
constexpr size_t kArena = 1 << 20;         // shared address space of one block: 20-bit offsets fit a wgmma descriptor
constexpr int kMaxWarps = 32;
constexpr int kAsync = kMaxWarps;          // the asynchronous copy engine counts as one more warp
constexpr int kAgents = kMaxWarps + 1;
constexpr size_t kMaxRegions = 64;
constexpr uint16_t kAsyncTid = 0xffff, kManyTid = 0xfffe;

enum State : uint8_t { READY, BLOCKED, DONE };
enum Why : uint8_t { NOTHING, IN_BARRIER, IN_WARP_OP, IN_MBARRIER, IN_GRID_BARRIER };

struct Block;
struct Copy {  // cp.async, or a bulk store, not yet landed
  char *dst;
  const char *src;
  int bytes, copied, group;
  bool tensor, add;
  TensorMap map;
  int32_t coords[5];
};
struct Deferred { CollFn fn; int group; char arg[kDeferredBytes]; };
struct Fiber : Thread {
  void *sp;
  char *stack;
  Block *blk;
  uint3 tid;
  State state;
  Why why;
  int bar;                                  // barrier id, or index of the mbarrier
  uint32_t parity;
  CollFn cfn;
  void *carg;
  unsigned cmask;
  std::vector<Copy> loads, stores;          // oldest first
  std::vector<Deferred> deferred;
  int load_groups, store_groups, deferred_groups;
};
static int num_warps = 0;                   // of a block of this launch
struct Clock {
  uint32_t t[kAgents];
  void join(const Clock &o) {
    for (int i = 0; i < num_warps; ++i) if (o.t[i] > t[i]) t[i] = o.t[i];
    if (o.t[kAsync] > t[kAsync]) t[kAsync] = o.t[kAsync];
  }
};
struct Bar { int arrived; Clock released; };
struct MBar {
  char *addr;
  uint32_t count, pending, phase;
  int64_t tx;
  Clock current, done;
};
struct Stamp {                              // one access: who, and when by that warp's clock
  uint32_t serial, clock, wepoch;           // serial of the block; warp clock; warp-operation epoch
  uint16_t tid1;                            // thread + 1, 0 = nobody
  uint8_t atomic, multi;                    // multi: several lanes of that warp in that epoch
};
struct alignas(64) Cell {                             // shadow of one granule of memory
  Stamp w, r;
  uint32_t wtime, rtime;                    // release time at the access, for ordering through atomics
  uint32_t other_serial, other_time;        // a reader in another block of this launch
  union {
    uint32_t rpc;                           // instruction of the last read, relative to the kernel's library
    uint32_t readers;                       // index of the per-warp reader table when r.tid1 == kManyTid
  };
  uint32_t wpc;                             // instruction of the last write
  uint32_t pend_serial;
  uint16_t pend_tid;
  uint8_t pend_kind, unused;                // a copy in flight: 1 its target, 2 its source, 3 operand of a wgmma
};
static_assert(sizeof(Cell) == 64, "one cache line per granule");
struct Shadow {
  Cell *cells;
  size_t capacity;                          // cells, at granule 1
  uint32_t shift;                           // granule = 1 << shift bytes
  size_t lo, hi;                            // touched cells
};
struct Region { const char *name; char *base; size_t size; uint32_t elem_bits; Traffic *traffic; Shadow *shadow; };
struct Named { const char *name; char *base; size_t size; uint32_t elem_bits; };
struct Flight { MBar *bar; int mbar; char *dst; const char *src; uint32_t bytes; bool tensor; TensorMap map; int32_t coords[5];
                uint32_t clock; Fiber *by; };
struct Readers { Stamp by[kAgents]; };
struct Block {
  uint3 bid;
  uint32_t serial;
  int n, live;
  std::vector<Fiber *> f;
  char *stacks;
  Bar bars[17];
  unsigned wlive[kMaxWarps], wwait[kMaxWarps];
  uint32_t wepoch[kMaxWarps];
  Clock seen[kAgents];                      // seen[w].t[v]: what warp w knows of warp v
  uint32_t now[kAgents];
  uint32_t acquired, seen_release;          // ordering through atomics: see fence()
  bool fenced;
  char *arena;
  size_t used;
  std::vector<Region> regions;
  Shadow shadows[kMaxRegions];              // kept between blocks, one per region
  uint32_t shadow_launch[kMaxRegions];
  std::vector<Named> names;
  std::vector<MBar> mbars;
  std::vector<Flight> flights;
  int reduce_acc[3], reduce_res[3];
};

Thread *self = nullptr;
static Fiber *cur = nullptr;                // same object as self
static void *sched_sp = nullptr;
static Launch *L = nullptr;
static void (*entry_fn)(void **) = nullptr;
static void **entry_args = nullptr;
static bool failed = false, probing = false, progress = false;
static int grid_arrived = 0, grid_live = 0;
static std::vector<Block *> resident, pool;
static uint32_t next_serial = 1, launch_serial = 1, release_time = 1;
static std::unordered_map<const void *, uint32_t> released_at;
static std::vector<Readers> readers;
static std::vector<Shadow> range_shadows;
static std::vector<Region> tensors;
static std::mt19937 rng;
static void *hook_pc = nullptr;            // the kernel instruction whose access is being checked
struct Suspect { char *p; size_t n; unsigned char old[16]; Region *region; Stamp other; bool other_block; void *pc; uint32_t other_pc; };
static Suspect suspects[16];
static int num_suspects = 0;

// ---- failing ---------------------------------------------------------------------------------------------------------
static void record(const char *kind, const char *format, va_list ap) {
  if (failed) return;
  failed = true;
  num_suspects = 0;
  Failure *f = L->failure;
  snprintf(f->kind, sizeof f->kind, "%s", kind);
  vsnprintf(f->text, sizeof f->text, format, ap);
  f->has_thread = cur != nullptr;
  if (!cur) return;
  uint3 b = cur->blk->bid, t = cur->tid;
  uint32_t bb[3] = {b.x, b.y, b.z}, tt[3] = {t.x, t.y, t.z};
  memcpy(f->block, bb, sizeof bb);
  memcpy(f->thread, tt, sizeof tt);
  if (hook_pc) f->pcs[0] = hook_pc;
  f->num_pcs = hook_pc ? 1 : backtrace(f->pcs, 24);
}
void note_failure(const char *kind, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  record(kind, format, ap);
  va_end(ap);
}
static void to_sched();
void fail(const char *kind, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  record(kind, format, ap);
  va_end(ap);
  cur->state = DONE;
  to_sched();
  abort();
}
// Names the buffer a pointer falls into; in the merged arena that is every buffer TileLang placed there.
static char place_text[160];
static const char *place(const Region *r, const char *p) {
  Failure *f = L->failure;
  const char *base = r->base;
  uint32_t bits = r->elem_bits;
  bool found = false;
  snprintf(f->buffer, sizeof f->buffer, "%s", r->name);
  if (!r->traffic)
    for (const Named &m : cur->blk->names) {
      if (p < m.base || p >= m.base + m.size) continue;
      size_t used = found ? strlen(f->buffer) : 0;
      snprintf(f->buffer + used, sizeof f->buffer - used, "%s%s", found ? "/" : "", m.name);
      if (!found) { base = m.base; bits = m.elem_bits; }
      found = true;
    }
  f->offset = p - base;
  f->element = f->offset * 8 / int64_t(bits ? bits : 8);
  snprintf(place_text, sizeof place_text, "%s%s byte %lld (element %lld)", r->traffic ? "" : "shared ", f->buffer,
           (long long)f->offset, (long long)f->element);
  return place_text;
}

// ---- shadow memory -----------------------------------------------------------------------------------------------------
// A granule starts at 16 bytes and shrinks when a smaller access arrives. Everything recorded before covered whole
// granules, so splitting a cell into copies of itself loses nothing.
static void shadow_reserve(Shadow &s, size_t bytes) {
  if (s.capacity < bytes + 16) {
    if (s.cells) munmap(s.cells, s.capacity * sizeof(Cell));
    s.capacity = (bytes + 16 + 4095) / 4096 * 4096;
    void *p = mmap(nullptr, s.capacity * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) { fprintf(stderr, "emulator: no address space for shadow memory\n"); abort(); }
    s.cells = static_cast<Cell *>(p);
  }
}
static void shadow_start(Shadow &s, size_t bytes) {
  shadow_reserve(s, bytes);
  s.shift = 4; s.lo = SIZE_MAX; s.hi = 0;
}
static void shadow_trim(Shadow &s) {      // give back what a large launch touched
  if (s.hi > s.lo && (s.hi - s.lo) * sizeof(Cell) > (32u << 20)) madvise(s.cells, s.capacity * sizeof(Cell), MADV_DONTNEED);
}
static void shadow_split(Shadow &s, uint32_t shift) {
  if (s.hi > s.lo) {
    uint32_t k = s.shift - shift;
    for (size_t i = s.hi; i-- > s.lo;) {
      Cell c = s.cells[i];
      for (size_t j = size_t(1) << k; j-- > 0;) {
        Cell &d = s.cells[(i << k) + j] = c;
        if (c.r.tid1 == kManyTid && c.r.serial >= launch_serial && j) { readers.push_back(Readers(readers[c.readers])); d.readers = uint32_t(readers.size() - 1); }
      }
    }
    s.lo <<= k; s.hi <<= k;
  }
  s.shift = shift;
}

// ---- order ---------------------------------------------------------------------------------------------------------------
// Warps carry vector clocks. Arriving at a barrier releases, leaving it acquires. Lanes of one warp are ordered by warp
// operations and by whatever their warp has acquired. All approximations are towards "ordered": no false reports.
static void release(Block *b, int warp, Clock &into) {
  into.join(b->seen[warp]);
  if (b->now[warp] > into.t[warp]) into.t[warp] = b->now[warp];
  b->now[warp]++;
}
static void acquire(Block *b, int warp, const Clock &from) {
  b->seen[warp].join(from);
  b->wepoch[warp]++;
}
static bool ordered(const Stamp &s, uint32_t time, const Fiber *f) {   // within one block
  const Block *b = f->blk;
  if (!s.tid1 || time <= b->acquired) return true;
  int v = s.tid1 == kAsyncTid ? kAsync : (s.tid1 - 1) >> 5;
  if (v == f->warp) return (!s.multi && s.tid1 - 1 == f->lin) || s.wepoch != b->wepoch[v];
  return b->seen[f->warp].t[v] >= s.clock;
}
static Stamp stamp(const Fiber *f, bool atomic) {
  const Block *b = f->blk;
  return {b->serial, b->now[f->warp], b->wepoch[f->warp], uint16_t(f->lin + 1), uint8_t(atomic), 0};
}
static char *image_lo = nullptr, *image_hi = nullptr;   // the kernel's own library
static uint32_t short_pc() {
  char *pc = static_cast<char *>(hook_pc);
  return pc >= image_lo && pc < image_hi ? uint32_t(pc - image_lo) : 0;
}
static bool same_epoch(const Stamp &a, const Stamp &b) { return a.wepoch == b.wepoch && (a.tid1 - 1) >> 5 == (b.tid1 - 1) >> 5; }

static const char *const kVerb[] = {"read of", "write to", "atomic on", "atomic read of"};
static const char *describe(char *out, size_t n, const Stamp &s, bool other_block) {
  if (other_block) snprintf(out, n, "another block (number %u of the launch)", s.serial - launch_serial);
  else if (s.tid1 == kAsyncTid) snprintf(out, n, "an asynchronous copy");
  else snprintf(out, n, "thread %d", s.tid1 - 1);
  return out;
}
[[noreturn]] static void race(const Region *r, char *p, size_t n, Access kind, const Stamp &s, bool other_block, bool was_write,
                              uint32_t other_pc, const char *extra = "") {
  char who[80];
  L->failure->other_pc = other_pc ? image_lo + other_pc : nullptr;
  describe(who, sizeof who, s, other_block);
  fail("race", "race: %zu-byte %s %s, %s by %s with no %s in between%s", n, kVerb[kind], place(r, p), was_write ? "written" : "read", who,
       other_block ? "grid barrier" : "barrier", extra);
}

// Two unordered plain writes are tolerated when they store the same bytes (TileLang replicates such stores). The hook runs
// before the store, so the comparison waits until the thread's next access or switch.
static void settle_suspects() {
  int n = num_suspects;
  num_suspects = 0;
  for (int i = 0; i < n; ++i) {
    Suspect &s = suspects[i];
    if (!memcmp(s.p, s.old, s.n)) continue;
    hook_pc = s.pc;
    race(s.region, s.p, s.n, WRITE, s.other, s.other_block, true, s.other_pc, " (different values)");
  }
}

static void add_reader(Cell &c, const Fiber *f, const Stamp &me) {
  Block *b = f->blk;
  Stamp &r = c.r;
  if (r.tid1 == kManyTid) {
    Stamp &e = readers[c.readers].by[f->warp];
    bool multi = e.tid1 && same_epoch(e, me) && (e.multi || e.tid1 != me.tid1);
    bool atomic = me.atomic && (!e.tid1 || e.atomic);
    e = me; e.multi = multi; e.atomic = atomic;
    return;
  }
  if (r.tid1 && r.tid1 != kAsyncTid && (r.tid1 - 1) >> 5 == f->warp) {
    bool multi = same_epoch(r, me) && (r.multi || r.tid1 != me.tid1);
    bool atomic = me.atomic && (r.atomic || !same_epoch(r, me));
    r = me; r.multi = multi; r.atomic = atomic;
    c.rpc = short_pc();
    return;
  }
  int v = r.tid1 == kAsyncTid ? kAsync : (r.tid1 - 1) >> 5;
  if (!r.tid1 || b->seen[f->warp].t[v] >= r.clock) { r = me; c.rpc = short_pc(); return; }
  readers.push_back(Readers{});
  c.readers = uint32_t(readers.size() - 1);
  readers.back().by[v] = r;
  readers.back().by[f->warp] = me;
  r.tid1 = kManyTid;
}

static void check_cell(Cell &c, Region *r, char *p, size_t n, Access kind, Fiber *f) {
  Block *b = f->blk;
  bool global = r->traffic != nullptr, write = kind == WRITE || kind == ATOMIC, atomic = kind >= ATOMIC;
  if (c.pend_kind && c.pend_serial == b->serial) {
    bool mine = c.pend_kind == 1 && write && c.pend_tid == uint16_t(f->lin + 1);
    static const char *const role[] = {"", "the target of an asynchronous copy", "the source of an asynchronous copy", "an operand of a wgmma"};
    if (!(c.pend_kind >= 2 && !write) && !mine)
      fail("race", "race: %zu-byte %s %s, %s of thread %d not yet waited for", n, kVerb[kind], place(r, p), role[c.pend_kind], c.pend_tid - 1);
  }
  // Stamps of other blocks: stale in shared memory, concurrent in global memory unless an acquire covers them.
  bool w_here = c.w.tid1 && c.w.serial == b->serial, r_here = c.r.tid1 && c.r.serial == b->serial;
  bool w_else = global && c.w.tid1 && !w_here && c.w.serial >= launch_serial && c.wtime > b->acquired;
  bool bad_w = ((w_here && !ordered(c.w, c.wtime, f)) || w_else) && !(atomic && c.w.atomic);
  if (bad_w) {
    if (kind != WRITE || c.w.atomic) race(r, p, n, kind, c.w, w_else, true, c.wpc);
    if (num_suspects < 16) {
      Suspect &x = suspects[num_suspects++] = {p, n, {}, r, c.w, w_else, hook_pc, c.wpc};
      memcpy(x.old, p, n);
    }
  }
  if (write) {
    if (r_here && c.r.tid1 == kManyTid) {
      for (const Stamp &s : readers[c.readers].by)
        if (s.tid1 && !(atomic && s.atomic) && !ordered(s, c.rtime, f)) race(r, p, n, kind, s, false, false, 0);
    } else if (r_here && !(atomic && c.r.atomic) && !ordered(c.r, c.rtime, f)) race(r, p, n, kind, c.r, false, false, c.rpc);
    if (global && c.r.tid1 && !r_here && c.r.serial >= launch_serial && c.rtime > b->acquired && !(atomic && c.r.atomic)) race(r, p, n, kind, c.r, true, false, c.r.tid1 == kManyTid ? 0 : c.rpc);
    if (global && c.other_serial >= launch_serial && c.other_serial != b->serial && c.other_time > b->acquired && !atomic) {
      Stamp s{}; s.serial = c.other_serial; s.tid1 = 1;
      race(r, p, n, kind, s, true, false, 0);
    }
  }
  Stamp me = stamp(f, atomic);
  size_t granule = size_t(1) << r->shadow->shift;
  if (write) {
    if (r->traffic && !(c.w.tid1 && c.w.serial >= launch_serial)) r->traffic->distinct_written += granule;
    me.multi = w_here && same_epoch(c.w, me) && (c.w.multi || c.w.tid1 != me.tid1);
    c.w = me; c.wtime = release_time; c.wpc = short_pc();
  }
  if (!write || kind == ATOMIC) {
    if (r->traffic && !(c.r.tid1 && c.r.serial >= launch_serial)) r->traffic->distinct_read += granule;
    if (kind == ATOMIC) { if (!r_here) { c.r = me; c.r.multi = 0; c.rtime = release_time; c.rpc = short_pc(); } return; }
    if (!r_here) {
      if (c.r.tid1 && c.r.serial >= launch_serial) { c.other_serial = c.r.serial; c.other_time = c.rtime; }
      c.r = me; c.rpc = short_pc();
    } else add_reader(c, f, me);
    c.rtime = release_time;
  }
}

// ---- the access check ---------------------------------------------------------------------------------------------------------
static Region *find_shared(Block *b, char *p, size_t n) {
  for (Region &r : b->regions) if (p >= r.base && p + n <= r.base + r.size) return &r;
  return nullptr;
}
static bool any_alignment = false;   // set while the copy engine works: it moves bytes, not words
static void check_region(Region *r, char *p, size_t n, Access kind, Fiber *f) {
  if (n <= 16 && (n & (n - 1)) == 0 && reinterpret_cast<uintptr_t>(p) % n && !any_alignment)
    fail("misaligned", "misaligned: %zu-byte %s %s", n, kVerb[kind], place(r, p));
  if (Traffic *t = r->traffic) (kind == WRITE ? t->written : kind == ATOMIC ? t->atomic : t->read) += n;
  Shadow &s = *r->shadow;
  size_t off = size_t(p - r->base);
  uint32_t fits = uint32_t(__builtin_ctzll(off | n));
  if (fits < s.shift) shadow_split(s, fits);
  size_t first = off >> s.shift, last = (off + n - 1) >> s.shift;
  s.lo = std::min(s.lo, first);
  s.hi = std::max(s.hi, last + 1);
  for (size_t i = first; i <= last; ++i) check_cell(s.cells[i], r, r->base + (i << s.shift), size_t(1) << s.shift, kind, f);
}
template <class Regions> static const Region *nearest(const Regions &regions, const char *p) {
  const Region *best = nullptr;
  ptrdiff_t dist = 0;
  for (const Region &r : regions) {
    ptrdiff_t d = p < r.base ? r.base - p : p - r.base - ptrdiff_t(r.size);
    if (!best || d < dist) { best = &r; dist = d; }
  }
  return best;
}
static void check(const void *ptr, size_t n, Access kind) {
  Fiber *f = cur;
  char *p = const_cast<char *>(static_cast<const char *>(ptr));
  if (!f || failed || !n || (p >= f->stack && p < f->stack + kStack)) return;
  if (num_suspects) settle_suspects();
  Block *b = f->blk;
  bool shared = p >= b->arena && p < b->arena + kArena;
  if (shared) {
    if (Region *r = find_shared(b, p, n)) return check_region(r, p, n, kind, f);
  } else {
    for (Region &r : tensors) if (p >= r.base && p + n <= r.base + r.size) return check_region(&r, p, n, kind, f);
    if (p >= image_lo && p < image_hi) return;                        // constants of the kernel itself
    if (p >= b->stacks && p < b->stacks + kStack * size_t(b->n)) return;  // a collective writes its peers' registers
  }
  const Region *near = shared ? nearest(b->regions, p) : nearest(tensors, p);
  if (!near) fail("out of bounds", "out of bounds: %zu-byte %s %s, and the kernel has none", n, kVerb[kind], shared ? "shared memory" : "global memory");
  fail("out of bounds", "out of bounds: %zu-byte %s %s; it has %zu bytes", n, kVerb[kind], place(near, p), near->size);
}
void access(const void *p, size_t n, Access kind) { if (L->check) check(p, n, kind); }

// Copies in flight: their target may not be touched, their source may not be written.
static void mark_pending(const void *ptr, size_t n, uint8_t kind, bool on) {
  if (!L->check || !n) return;
  char *p = const_cast<char *>(static_cast<const char *>(ptr));
  Block *b = cur->blk;
  Region *r = find_shared(b, p, n);
  if (!r) return;
  Shadow &s = *r->shadow;
  size_t off = size_t(p - r->base);
  uint32_t fits = uint32_t(__builtin_ctzll(off | n));
  if (fits < s.shift) shadow_split(s, fits);
  s.lo = std::min(s.lo, off >> s.shift);
  s.hi = std::max(s.hi, ((off + n - 1) >> s.shift) + 1);
  for (size_t i = off >> s.shift; i <= (off + n - 1) >> s.shift; ++i) {
    Cell &c = s.cells[i];
    // An operand mark must not hide that a copy into the same place is still in flight.
    if (kind == 3 && c.pend_serial == b->serial && c.pend_kind && c.pend_kind != 3) continue;
    c.pend_serial = b->serial; c.pend_tid = uint16_t(cur->lin + 1); c.pend_kind = on ? kind : 0;
  }
}
// The copy engine has written: later accesses must have acquired `clock` through the mbarrier.
static void stamp_async(Block *b, char *p, size_t n, uint32_t clock) {
  if (!L->check) return;
  Region *r = find_shared(b, p, n);
  if (!r) return;
  Shadow &s = *r->shadow;
  size_t off = size_t(p - r->base);
  uint32_t fits = uint32_t(__builtin_ctzll(off | n));
  if (fits < s.shift) shadow_split(s, fits);
  for (size_t i = off >> s.shift; i <= (off + n - 1) >> s.shift; ++i) {
    Cell &c = s.cells[i];
    c.w = {b->serial, clock, 0, kAsyncTid, 0, 0};
    c.wpc = 0;
    c.wtime = release_time;
    c.pend_kind = 0;
  }
}

// ---- fibers and the scheduler ---------------------------------------------------------------------------------------------------
static char deadlock_text[400];
static void to_sched() {
  Fiber *f = cur;
  if (num_suspects && !failed) settle_suspects();
  emu_switch(&f->sp, sched_sp);
}
static void block_on(Why why) {
  cur->state = BLOCKED;
  cur->why = why;
  progress = true;
  to_sched();
  if (probing) fail("deadlock", "%s", deadlock_text);   // resumed only to say where it waits
}
void yield() { to_sched(); }
unsigned live_lanes() { return cur->blk->wlive[cur->warp]; }

static void on_exit_fiber(Fiber *f);
static void fiber_main() {
  entry_fn(entry_args);
  if (!cur->stores.empty()) fail("race", "race: the thread ends with a bulk store it has not waited for");
  if (!cur->deferred.empty()) fail("race", "race: the thread ends with a wgmma it has not waited for");
  if (num_suspects) settle_suspects();
  cur->state = DONE;
  progress = true;
  on_exit_fiber(cur);
  to_sched();
  abort();
}
static void prepare(Fiber *f) {
  auto *top = reinterpret_cast<void **>(f->stack + kStack - 64);     // 16-byte aligned
  *--top = nullptr;                                                   // ends the unwinder's walk
  *--top = reinterpret_cast<void *>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  *reinterpret_cast<uint64_t *>(f->stack) = kCanary;
  f->sp = top; f->state = READY; f->why = NOTHING; f->bar = -1;
  f->loads.clear(); f->stores.clear(); f->deferred.clear();
  f->load_groups = f->store_groups = f->deferred_groups = 0;
}
static void *map_memory(size_t bytes) {
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) { fprintf(stderr, "emulator: out of address space\n"); abort(); }
  return p;
}
static Block *take_block(int n) {
  for (size_t i = 0; i < pool.size(); ++i)
    if (pool[i]->n == n) { Block *b = pool[i]; pool.erase(pool.begin() + long(i)); return b; }
  Block *b = new Block();
  b->n = n;
  b->arena = static_cast<char *>(map_memory(kArena));
  b->stacks = static_cast<char *>(map_memory(kStack * size_t(n)));
  b->regions.reserve(kMaxRegions);
  for (int i = 0; i < n; ++i) {
    Fiber *f = new Fiber();
    f->blk = b; f->stack = b->stacks + kStack * size_t(i); f->lin = i; f->warp = i / 32; f->lane = i % 32;
    b->f.push_back(f);
  }
  return b;
}
static void drop_block(Block *b) {
  munmap(b->arena, kArena);
  munmap(b->stacks, kStack * size_t(b->n));
  for (Fiber *f : b->f) delete f;
  for (Shadow &s : b->shadows) if (s.cells) munmap(s.cells, s.capacity * sizeof(Cell));
  delete b;
}
static void reset_block(Block *b, uint64_t id) {
  b->bid = {unsigned(id % gridDim.x), unsigned(id / gridDim.x % gridDim.y), unsigned(id / (uint64_t(gridDim.x) * gridDim.y))};
  b->serial = next_serial++;
  b->live = b->n;
  b->acquired = b->seen_release = 0;
  b->fenced = false;
  b->used = 0;
  b->regions.clear(); b->names.clear(); b->mbars.clear(); b->flights.clear();
  memset(b->bars, 0, sizeof b->bars);
  memset(b->seen, 0, sizeof b->seen);
  for (uint32_t &t : b->now) t = 1;
  b->reduce_acc[BAR_OR] = 0; b->reduce_acc[BAR_AND] = 1; b->reduce_acc[BAR_COUNT] = 0;
  for (int w = 0; w * 32 < b->n; ++w) {
    int k = b->n - w * 32;
    b->wlive[w] = k >= 32 ? ~0u : (1u << k) - 1;
    b->wwait[w] = 0;
    b->wepoch[w] = 1;
  }
  for (Fiber *f : b->f) {
    unsigned i = unsigned(f->lin);
    f->tid = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    prepare(f);
  }
}
static void resume(Fiber *f) {
  cur = f; self = f; threadIdx = f->tid; blockIdx = f->blk->bid;
  emu_switch(&sched_sp, f->sp);
  if (f->state == DONE && *reinterpret_cast<uint64_t *>(f->stack) != kCanary && !failed)
    note_failure("stack", "the thread overran its emulated stack of %zu bytes", kStack);
  cur = nullptr; self = nullptr;
}
static void land_one_flight(const std::vector<Block *> &blocks);
static bool any_flight(const std::vector<Block *> &blocks) {
  for (Block *b : blocks) if (!b->flights.empty()) return true;
  return false;
}
static void describe_deadlock(const std::vector<Fiber *> &fibers) {
  static const char *const name[] = {"nothing", "a block barrier", "a warp operation", "an mbarrier", "the grid barrier"};
  int count[5] = {}, total = 0;
  for (Fiber *f : fibers) if (f->state == BLOCKED) { count[f->why]++; total++; }
  int used = snprintf(deadlock_text, sizeof deadlock_text, "deadlock: %d threads wait for ever:", total);
  const char *sep = " ";
  for (int i = 1; i < 5; ++i)
    if (count[i]) { used += snprintf(deadlock_text + used, sizeof deadlock_text - size_t(used), "%s%d in %s", sep, count[i], name[i]); sep = ", "; }
}
// Runs the fibers of the resident blocks until all have ended. Copies in flight land only when nothing else can run.
static void run_blocks(const std::vector<Block *> &blocks) {
  std::vector<Fiber *> fibers;
  for (Block *b : blocks) fibers.insert(fibers.end(), b->f.begin(), b->f.end());
  if (L->order == 1) std::reverse(fibers.begin(), fibers.end());
  grid_live = int(fibers.size()); grid_arrived = 0;
  resident = blocks;
  for (int spins = 0;;) {
    bool ready = false, left = false;
    progress = false;
    if (L->order == 2) std::shuffle(fibers.begin(), fibers.end(), rng);
    for (Fiber *f : fibers) {
      left |= f->state != DONE;
      if (f->state != READY) continue;
      ready = true;
      resume(f);
      if (failed) return;
    }
    if (!left) return;
    if (progress) { spins = 0; continue; }
    if (any_flight(blocks)) { land_one_flight(blocks); if (failed) return; continue; }
    if (!ready) {
      describe_deadlock(fibers);
      for (Fiber *f : fibers) if (f->state == BLOCKED) { probing = true; resume(f); probing = false; return; }
    }
    if (++spins > 20000) {
      for (Fiber *f : fibers) if (f->state == READY) {
        cur = f;
        note_failure("deadlock", "no progress: threads spin on memory that nobody writes (a wait for another block needs cooperative=True)");
        cur = nullptr;
        return;
      }
    }
  }
}

// ---- block and grid barriers --------------------------------------------------------------------------------------------------------
static void wake_bar(Block *b, int id, int extra_warp) {
  Bar &r = b->bars[id];
  r.arrived = 0;
  L->barriers++;
  progress = true;
  if (id == 0) {
    memcpy(b->reduce_res, b->reduce_acc, sizeof b->reduce_res);
    b->reduce_acc[BAR_OR] = 0; b->reduce_acc[BAR_AND] = 1; b->reduce_acc[BAR_COUNT] = 0;
  }
  unsigned warps = extra_warp >= 0 ? 1u << extra_warp : 0;
  for (Fiber *f : b->f)
    if (f->state == BLOCKED && (f->why == IN_BARRIER || f->why == IN_GRID_BARRIER) && f->bar == id) { f->state = READY; f->bar = -1; warps |= 1u << f->warp; }
  for (int w = 0; w < num_warps; ++w) if (warps >> w & 1) acquire(b, w, r.released);
  memset(&r.released, 0, sizeof r.released);
}
void bar_sync(int id, int count, bool wait) {
  Block *b = cur->blk;
  if (id < 0 || id > 15) fail("barrier", "barrier %d does not exist: a block has barriers 0 to 15", id);
  if (count > b->n) fail("barrier", "barrier %d waits for %d threads, the block has %d", id, count, b->n);
  Bar &r = b->bars[id];
  release(b, cur->warp, r.released);
  if (++r.arrived >= (count > 0 ? count : b->live)) return wake_bar(b, id, wait ? cur->warp : -1);
  if (wait) { cur->bar = id; block_on(IN_BARRIER); }
}
int bar_reduce(BarReduce op, int predicate) {
  Block *b = cur->blk;
  int p = !!predicate, &acc = b->reduce_acc[op];
  acc = op == BAR_OR ? acc | p : op == BAR_AND ? acc & p : acc + p;
  bar_sync(0, 0);
  return b->reduce_res[op];
}
void grid_sync() {
  if (!L->cooperative && uint64_t(gridDim.x) * gridDim.y * gridDim.z > 1) fail("barrier", "a grid barrier needs a cooperative launch");
  release(cur->blk, cur->warp, cur->blk->bars[16].released);
  if (++grid_arrived < grid_live) { cur->bar = 16; return block_on(IN_GRID_BARRIER); }
  grid_arrived = 0;
  for (Block *b : resident) {
    b->acquired = release_time;
    wake_bar(b, 16, b == cur->blk ? cur->warp : -1);
  }
  L->barriers -= resident.size() - 1;     // one barrier, however many blocks
  release_time++;
}

// ---- ordering through atomics ------------------------------------------------------------------------------------------------------------
// A release (memory order, or a fence before a relaxed atomic) publishes everything so far; an acquire on the same address
// (memory order, or a fence after the atomic) orders it. Kept per block, not per thread: errs towards "ordered".
void atomic_order(const void *p, int order) {
  if (!L->check) return;
  Block *b = cur->blk;
  auto it = released_at.find(p);
  if (it != released_at.end()) {
    b->seen_release = std::max(b->seen_release, it->second);
    if (order == 1 || order == 2 || order >= 4) b->acquired = std::max(b->acquired, it->second);
  }
  if (order >= 3 || b->fenced) released_at[p] = release_time++;
}
void fence() {
  if (!L->check) return;
  Block *b = cur->blk;
  b->fenced = true;
  b->acquired = std::max(b->acquired, b->seen_release);
}

// ---- warp operations ----------------------------------------------------------------------------------------------------------------------
static void fire(Block *b, int w, unsigned lanes) {
  void *args[32] = {};
  CollFn fn = nullptr;
  unsigned mask = 0;
  for (int l = 0; l < 32; ++l) if (lanes >> l & 1) {
    Fiber *f = b->f[size_t(w * 32 + l)];
    if (!fn) { fn = f->cfn; mask = f->cmask; }
    else if (f->cfn != fn || f->cmask != mask) note_failure("divergence", "lanes of one warp met in different warp operations or with different masks");
    args[l] = f->carg;
  }
  if (!failed && fn) fn(lanes, args);
  L->warp_ops++;
  progress = true;
  b->wepoch[w]++;
  b->wwait[w] &= ~lanes;
  for (int l = 0; l < 32; ++l) if (lanes >> l & 1) b->f[size_t(w * 32 + l)]->state = READY;
}
void collective(unsigned mask, CollFn fn, void *arg) {
  Fiber *f = cur;
  Block *b = f->blk;
  int w = f->warp;
  if (!(mask >> f->lane & 1)) fail("divergence", "a lane calls a warp operation whose mask 0x%x omits it", mask);
  f->cfn = fn; f->carg = arg; f->cmask = mask;
  b->wwait[w] |= 1u << f->lane;
  if (num_suspects) settle_suspects();
  unsigned need = mask & b->wlive[w];
  if ((b->wwait[w] & need) != need) return block_on(IN_WARP_OP);
  fire(b, w, need);
  if (failed) { f->state = DONE; to_sched(); }
}
void defer(CollFn fn, const void *arg, size_t bytes) {
  Deferred d{fn, cur->deferred_groups, {}};
  memcpy(d.arg, arg, bytes);
  if (L->async_late) cur->deferred.push_back(d); else collective(~0u, fn, d.arg);
}
bool marks_operands() { return L->check && L->async_late; }
void mark_operand(const void *p, size_t bytes, bool on) { mark_pending(p, bytes, 3, on); }
void defer_commit() { cur->deferred_groups++; }
void defer_wait(int keep) {
  Fiber *f = cur;
  size_t i = 0;
  while (i < f->deferred.size() && f->deferred[i].group < f->deferred_groups - keep) {
    collective(~0u, f->deferred[i].fn, f->deferred[i].arg);
    ++i;
  }
  f->deferred.erase(f->deferred.begin(), f->deferred.begin() + long(i));
}
static void on_exit_fiber(Fiber *f) {
  Block *b = f->blk;
  int w = f->warp;
  b->live--; grid_live--;
  b->wlive[w] &= ~(1u << f->lane);
  for (int l = 0; l < 32; ++l) if (b->wwait[w] >> l & 1) {            // those who waited for this lane only
    unsigned need = b->f[size_t(w * 32 + l)]->cmask & b->wlive[w];
    if ((b->wwait[w] & need) == need) fire(b, w, need);
  }
  if (b->live && b->bars[0].arrived >= b->live) wake_bar(b, 0, -1);
}

// ---- shared memory ---------------------------------------------------------------------------------------------------------------------------
// Each buffer has its own part of the arena with a gap on both sides, and starts as 0xFF (NaN, -1): uninitialised reads show.
char *shared_buf(const char *name, size_t bytes, int elem_bits, size_t align) {
  Block *b = cur->blk;
  for (Region &r : b->regions) if (r.name == name || !strcmp(r.name, name)) return r.base;
  size_t off = (b->used + 64 + align - 1) / align * align;
  if (off + bytes > kArena || b->regions.size() == kMaxRegions) fail("shared memory", "shared buffer %s (%zu bytes) does not fit the emulated arena", name, bytes);
  b->used = off + bytes;
  size_t slot = b->regions.size();
  Shadow &s = b->shadows[slot];
  if (L->check) {
    if (b->shadow_launch[slot] != launch_serial) { shadow_start(s, bytes); b->shadow_launch[slot] = launch_serial; }
    shadow_reserve(s, bytes);
    s.lo = SIZE_MAX; s.hi = 0;
  }
  char *p = b->arena + off;
  memset(p, 0xff, bytes);
  b->regions.push_back({name, p, bytes, uint32_t(elem_bits), nullptr, &s});
  return p;
}
char *dyn_shared(const char *name, size_t bytes, int elem_bits) {
  return shared_buf(name, bytes ? bytes : L->dyn_bytes, elem_bits, 1024);
}
void name_shared(const char *name, void *p, size_t bytes, int elem_bits) {
  Block *b = cur->blk;
  for (const Named &m : b->names) if (!strcmp(m.name, name)) return;
  b->names.push_back({name, static_cast<char *>(p), bytes, uint32_t(elem_bits)});
}
uint32_t smem_addr(const void *p) {
  ptrdiff_t a = static_cast<const char *>(p) - cur->blk->arena;
  if (a < 0 || a >= ptrdiff_t(kArena)) fail("out of bounds", "out of bounds: a shared-memory address was expected");
  return uint32_t(a);
}
char *smem_ptr(uint32_t a) { return cur->blk->arena + (a & (kArena - 1)); }

// ---- cp.async -----------------------------------------------------------------------------------------------------------------------------------
static void land_copy(const Copy &c) {
  if (L->async_late) mark_pending(c.dst, size_t(c.bytes), 1, false);
  access(c.dst, size_t(c.bytes), WRITE);
  if (c.copied) { access(c.src, size_t(c.copied), READ); memcpy(c.dst, c.src, size_t(c.copied)); }
  memset(c.dst + c.copied, 0, size_t(c.bytes - c.copied));
}
void cp_async(void *dst, const void *src, int bytes, int copied) {
  Fiber *f = cur;
  Copy c{};
  c.dst = static_cast<char *>(dst); c.src = static_cast<const char *>(src); c.bytes = bytes; c.copied = copied; c.group = f->load_groups;
  L->async_ops++;
  if (!L->async_late) return land_copy(c);
  access(dst, size_t(bytes), WRITE);                    // the write may happen from here on ...
  mark_pending(dst, size_t(bytes), 1, true);            // ... until the wait
  f->loads.push_back(c);
}
void cp_commit() { cur->load_groups++; }
void cp_wait(int keep) {                                // land all but the newest `keep` committed groups
  Fiber *f = cur;
  size_t i = 0;
  while (i < f->loads.size() && f->loads[i].group < f->load_groups - keep) land_copy(f->loads[i++]);
  f->loads.erase(f->loads.begin(), f->loads.begin() + long(i));
}

// ---- mbarrier ------------------------------------------------------------------------------------------------------------------------------------
static int mbar_index(void *bar) {
  Block *b = cur->blk;
  for (size_t i = 0; i < b->mbars.size(); ++i) if (b->mbars[i].addr == bar) return int(i);
  if (Region *r = find_shared(b, static_cast<char *>(bar), 8)) place(r, static_cast<char *>(bar));
  fail("barrier", "an mbarrier is used before any thread has initialised it");
}
static void mbar_complete(Block *b, int index) {
  MBar &m = b->mbars[size_t(index)];
  if (m.pending || m.tx) return;
  m.phase++;
  m.pending = m.count;
  m.done.join(m.current);
  memset(&m.current, 0, sizeof m.current);
  L->barriers++;
  progress = true;
  for (Fiber *f : b->f)
    if (f->state == BLOCKED && f->why == IN_MBARRIER && f->bar == index && (m.phase & 1) != f->parity) { f->state = READY; f->bar = -1; }
}
void mbar_init(void *bar, uint32_t count) {
  Block *b = cur->blk;
  access(bar, 8, WRITE);
  memset(bar, 0x5a, 8);
  for (MBar &m : b->mbars) if (m.addr == bar) { m = MBar{}; m.addr = static_cast<char *>(bar); m.count = m.pending = count; return; }
  MBar m{};
  m.addr = static_cast<char *>(bar); m.count = m.pending = count;
  b->mbars.push_back(m);
}
void mbar_arrive(void *bar, uint32_t expect_tx, bool arrive) {
  Block *b = cur->blk;
  int i = mbar_index(bar);
  access(bar, 8, ATOMIC);
  MBar &m = b->mbars[size_t(i)];
  m.tx += expect_tx;
  if (!arrive) return;
  if (!m.pending) fail("barrier", "more arrivals on an mbarrier than its count of %u in one phase", m.count);
  m.pending--;
  release(b, cur->warp, m.current);
  mbar_complete(b, i);
}
// Arrives once the thread's earlier cp.async copies are complete; without noinc the phase also expects one arrival more.
void mbar_cp_async_arrive(void *bar, bool noinc) {
  cp_commit();
  cp_wait(0);
  if (!noinc) cur->blk->mbars[size_t(mbar_index(bar))].pending++;
  mbar_arrive(bar, 0, true);
}
bool mbar_test(void *bar, uint32_t parity) {
  int i = mbar_index(bar);
  access(bar, 8, ATOMIC);
  MBar &m = cur->blk->mbars[size_t(i)];
  if ((m.phase & 1) == (parity & 1)) return false;
  acquire(cur->blk, cur->warp, m.done);
  return true;
}
void mbar_wait(void *bar, uint32_t parity) {
  while (!mbar_test(bar, parity)) {
    cur->bar = mbar_index(bar);
    cur->parity = parity & 1;
    block_on(IN_MBARRIER);
  }
}

// ---- bulk and tensor copies -------------------------------------------------------------------------------------------------------------------
// Visits the box of a tensor map element by element: visit(shared offset, global address or nullptr when outside).
template <class F> static void for_box(const TensorMap &m, const int32_t *coords, uint32_t smem_base, F visit) {
  uint32_t bits = m.swizzle == 3 ? 7 : m.swizzle == 2 ? 3 : m.swizzle == 1 ? 1 : 0;
  int n[5] = {1, 1, 1, 1, 1}, at[5];
  for (int d = 0; d < m.rank; ++d) n[d] = m.box[d];
  uint32_t off = smem_base;
  for (at[4] = 0; at[4] < n[4]; ++at[4]) for (at[3] = 0; at[3] < n[3]; ++at[3]) for (at[2] = 0; at[2] < n[2]; ++at[2])
  for (at[1] = 0; at[1] < n[1]; ++at[1]) for (at[0] = 0; at[0] < n[0]; ++at[0], off += uint32_t(m.elem_bytes)) {
    char *g = m.base;
    for (int d = 0; d < m.rank && g; ++d) {
      int64_t x = int64_t(coords[d]) + at[d];
      g = x < 0 || x >= m.dims[d] ? nullptr : g + x * m.strides[d];
    }
    visit(off ^ ((off >> 7 & bits) << 4), g);
  }
}
static uint32_t box_bytes(const TensorMap &m) {
  uint32_t n = uint32_t(m.elem_bytes);
  for (int d = 0; d < m.rank; ++d) n *= uint32_t(m.box[d]);
  return n;
}
static void require_aligned(uint32_t smem, uint32_t align, const char *what) {
  if (smem % align) fail("misaligned", "misaligned: the shared side of %s is at byte %u of shared memory, it needs %u-byte alignment", what, smem, align);
}
static void land_flight(Block *b, const Flight &x) {
  if (x.tensor)
    for_box(x.map, x.coords, uint32_t(x.dst - b->arena), [&](uint32_t s, char *g) {
      if (g) memcpy(b->arena + s, g, size_t(x.map.elem_bytes)); else memset(b->arena + s, 0, size_t(x.map.elem_bytes));
    });
  else memcpy(x.dst, x.src, x.bytes);
  stamp_async(b, x.dst, x.bytes, x.clock);
  MBar &m = b->mbars[size_t(x.mbar)];
  m.current.t[kAsync] = std::max(m.current.t[kAsync], x.clock);
  m.tx -= x.bytes;
  progress = true;
  mbar_complete(b, x.mbar);
}
static void land_one_flight(const std::vector<Block *> &blocks) {
  for (Block *b : blocks) {
    if (b->flights.empty()) continue;
    size_t i = L->order == 0 ? 0 : L->order == 1 ? b->flights.size() - 1 : rng() % b->flights.size();
    Flight x = b->flights[i];
    b->flights.erase(b->flights.begin() + long(i));
    return land_flight(b, x);
  }
}
static void start_flight(Flight &x) {
  Block *b = cur->blk;
  L->async_ops++;
  access(x.dst, x.bytes, WRITE);                        // the target must be free, as seen by the issuing thread
  mark_pending(x.dst, x.bytes, 1, true);
  b->now[kAsync]++;
  x.clock = b->now[kAsync];
  x.by = cur;
  if (L->async_late) b->flights.push_back(x); else land_flight(b, x);
}
struct AnyAlignment { AnyAlignment() { any_alignment = true; } ~AnyAlignment() { any_alignment = false; } };

void bulk_load(void *dst, const void *src, uint32_t bytes, void *bar) {
  Flight x{};
  x.mbar = mbar_index(bar);
  x.dst = static_cast<char *>(dst); x.src = static_cast<const char *>(src); x.bytes = bytes;
  require_aligned(smem_addr(dst), 16, "a bulk copy");
  if (bytes % 16 || reinterpret_cast<uintptr_t>(src) % 16) fail("misaligned", "misaligned: a bulk copy of %u bytes needs 16-byte address and size", bytes);
  access(src, bytes, READ);
  start_flight(x);
}
void tensor_load(const TensorMap &map, void *dst, void *bar, const int32_t *coords) {
  Flight x{};
  x.mbar = mbar_index(bar);
  x.dst = static_cast<char *>(dst); x.bytes = box_bytes(map); x.tensor = true; x.map = map;
  memcpy(x.coords, coords, sizeof(int32_t) * size_t(map.rank));
  require_aligned(smem_addr(dst), 128, "a tensor copy");
  if (L->check) for_box(map, coords, smem_addr(dst), [&](uint32_t, char *g) { if (g) access(g, size_t(map.elem_bytes), READ); });
  AnyAlignment bytes_only;
  start_flight(x);
}
template <class T> static void add_to(char *g, const char *s) { T a, b; memcpy(&a, g, sizeof a); memcpy(&b, s, sizeof b); a = T(a + b); memcpy(g, &a, sizeof a); }
static void add_element(char *g, const char *s, int kind) {   // kind: CUtensorMapDataType
  switch (kind) {
    case 2: return add_to<uint32_t>(g, s);
    case 3: return add_to<int32_t>(g, s);
    case 4: return add_to<uint64_t>(g, s);
    case 5: return add_to<int64_t>(g, s);
    case 7: return add_to<float>(g, s);
    case 6: { __half a, b; memcpy(&a, g, 2); memcpy(&b, s, 2); a = __float2half_rn(__half2float(a) + __half2float(b)); memcpy(g, &a, 2); return; }
    case 9: { __nv_bfloat16 a, b; memcpy(&a, g, 2); memcpy(&b, s, 2); a = __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b)); memcpy(g, &a, 2); return; }
    default: fail("unsupported", "reducing bulk store of element type %d is not supported by the emulator", kind);
  }
}
static void land_store(const Copy &c) {
  mark_pending(c.src, size_t(c.bytes), 2, false);
  Access kind = c.add ? ATOMIC : WRITE;
  char *arena = cur->blk->arena;
  if (c.tensor)
    for_box(c.map, c.coords, uint32_t(c.src - arena), [&](uint32_t s, char *g) {
      if (!g) return;
      access(g, size_t(c.map.elem_bytes), kind);
      if (c.add) add_element(g, arena + s, c.map.kind); else memcpy(g, arena + s, size_t(c.map.elem_bytes));
    });
  else {
    access(c.dst, size_t(c.bytes), kind);
    if (c.add) for (int i = 0; i < c.bytes; i += 4) add_to<float>(c.dst + i, c.src + i); else memcpy(c.dst, c.src, size_t(c.bytes));
  }
}
static void start_store(const Copy &c) {
  L->async_ops++;
  access(c.src, size_t(c.bytes), READ);
  if (!L->async_late) return land_store(c);
  mark_pending(c.src, size_t(c.bytes), 2, true);
  cur->stores.push_back(c);
}
void bulk_store(void *dst, const void *src, uint32_t bytes, bool add) {
  Copy c{};
  c.dst = static_cast<char *>(dst); c.src = static_cast<const char *>(src); c.bytes = int(bytes); c.add = add; c.group = cur->store_groups;
  require_aligned(smem_addr(src), 16, "a bulk copy");
  start_store(c);
}
void tensor_store(const TensorMap &map, const void *src, const int32_t *coords, bool add) {
  Copy c{};
  c.src = static_cast<const char *>(src); c.bytes = int(box_bytes(map)); c.tensor = true; c.add = add; c.map = map; c.group = cur->store_groups;
  memcpy(c.coords, coords, sizeof(int32_t) * size_t(map.rank));
  require_aligned(smem_addr(src), 128, "a tensor copy");
  AnyAlignment bytes_only;
  start_store(c);
}
void store_commit() { cur->store_groups++; }
void store_wait(int keep) {
  Fiber *f = cur;
  size_t i = 0;
  while (i < f->stores.size() && f->stores[i].group < f->store_groups - keep) land_store(f->stores[i++]);
  f->stores.erase(f->stores.begin(), f->stores.begin() + long(i));
}

// ---- launch --------------------------------------------------------------------------------------------------------------------------------------
static void find_image(void *inside) {
  struct Query { char *p, *lo, *hi; } q{static_cast<char *>(inside), nullptr, nullptr};
  dl_iterate_phdr([](dl_phdr_info *i, size_t, void *data) -> int {
    Query &q = *static_cast<Query *>(data);
    char *lo = nullptr, *hi = nullptr;
    for (int k = 0; k < i->dlpi_phnum; ++k) if (i->dlpi_phdr[k].p_type == PT_LOAD) {
      char *a = reinterpret_cast<char *>(i->dlpi_addr + i->dlpi_phdr[k].p_vaddr), *e = a + i->dlpi_phdr[k].p_memsz;
      if (!lo || a < lo) lo = a;
      if (e > hi) hi = e;
    }
    if (q.p < lo || q.p >= hi) return 0;
    q.lo = lo; q.hi = hi;
    return 1;
  }, &q);
  image_lo = q.lo; image_hi = q.hi;
}

int launch(Launch *l, void (*entry)(void **), void **args) {
  L = l; entry_fn = entry; entry_args = args;
  failed = probing = false;
  cur = nullptr; self = nullptr; hook_pc = nullptr; num_suspects = 0; any_alignment = false;
  memset(l->failure, 0, sizeof *l->failure);
  l->blocks = l->threads = l->barriers = l->warp_ops = l->async_ops = 0;
  blockDim = {l->block[0], l->block[1], l->block[2]};
  gridDim = {l->grid[0], l->grid[1], l->grid[2]};
  rng.seed(l->seed);
  launch_serial = next_serial;
  release_time = 1;
  released_at.clear();
  readers.clear();
  int n = int(blockDim.x * blockDim.y * blockDim.z);
  num_warps = (n + 31) / 32;
  uint64_t total = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
  tensors.clear();
  if (l->check) {
    find_image(reinterpret_cast<void *>(entry));
    if (range_shadows.size() < size_t(l->num_ranges)) range_shadows.resize(size_t(l->num_ranges));
    for (int i = 0; i < l->num_ranges; ++i) {
      Range &r = l->ranges[i];
      memset(&r.traffic, 0, sizeof r.traffic);
      shadow_start(range_shadows[size_t(i)], r.size);
      tensors.push_back({r.name, r.base, r.size, r.elem_bits, &r.traffic, &range_shadows[size_t(i)]});
    }
  }
  std::vector<Block *> blocks;
  if (l->cooperative) {
    for (uint64_t i = 0; i < total; ++i) { blocks.push_back(take_block(n)); reset_block(blocks.back(), i); }
    if (total) run_blocks(blocks);
    l->blocks = total; l->threads = total * uint64_t(n);
  } else if (total) {
    std::vector<uint32_t> shuffled;
    if (l->order == 2) {
      shuffled.resize(total);
      for (uint64_t i = 0; i < total; ++i) shuffled[i] = uint32_t(i);
      std::shuffle(shuffled.begin(), shuffled.end(), rng);
    }
    blocks.push_back(take_block(n));
    for (uint64_t i = 0; i < total && !failed; ++i) {
      readers.clear();
      reset_block(blocks[0], l->order == 1 ? total - 1 - i : l->order == 2 ? shuffled[i] : i);
      run_blocks(blocks);
      l->blocks++; l->threads += uint64_t(n);
    }
  }
  for (Shadow &s : range_shadows) shadow_trim(s);
  for (Block *b : blocks) if (pool.size() < 4) pool.push_back(b); else drop_block(b);
  resident.clear();
  tensors.clear();
  return failed;
}
}  // namespace emu

// ---- hooks: the compiler's thread-sanitizer instrumentation calls these before every access of the kernel -----------------------
// (Not address-sanitizer's: that one checks an address once per basic block and so misses the store of a read-modify-write.)
#define EMU_API extern "C" __attribute__((visibility("default")))
static inline void hook(void *p, size_t n, emu::Access kind, void *pc, bool aligned = true) {
  if (!emu::L || !emu::L->check) return;
  emu::hook_pc = pc;
  emu::any_alignment = !aligned;
  emu::check(p, n, kind);
  emu::any_alignment = false;
  emu::hook_pc = nullptr;
}
#define EMU_HOOK(N)                                                                                                          \
  EMU_API void __tsan_read##N(void *p) { hook(p, N, emu::READ, __builtin_return_address(0)); }                               \
  EMU_API void __tsan_write##N(void *p) { hook(p, N, emu::WRITE, __builtin_return_address(0)); }                             \
  EMU_API void __tsan_unaligned_read##N(void *p) { hook(p, N, emu::READ, __builtin_return_address(0), false); }              \
  EMU_API void __tsan_unaligned_write##N(void *p) { hook(p, N, emu::WRITE, __builtin_return_address(0), false); }
EMU_HOOK(1) EMU_HOOK(2) EMU_HOOK(4) EMU_HOOK(8) EMU_HOOK(16)
EMU_API void __tsan_read_range(void *p, size_t n) { hook(p, n, emu::READ, __builtin_return_address(0)); }
EMU_API void __tsan_write_range(void *p, size_t n) { hook(p, n, emu::WRITE, __builtin_return_address(0)); }
EMU_API void __tsan_init() {}
EMU_API void __tsan_func_entry(void *) {}
EMU_API void __tsan_func_exit() {}
