// The runtime's data: threads, blocks, barriers, shadow cells; and how a launch fails.
// Included by runtime.cpp inside namespace emu.
#pragma once

// ---- state --------------------------------------------------------------------------------------------------------
// Address space per thread; only touched pages are real. The lowest page is a guard; the top is shifted by a part of the
// last page, or the tops of all stacks would share one cache set and every switch would miss.
constexpr size_t kPage = 4096;
constexpr size_t kStackRoom = 256 << 10, kStack = kStackRoom + 2 * kPage;
constexpr int kMaxGuards = 8192;           // a guard costs two of a process's 65530 mappings
constexpr uint64_t kCanary = 0x5afe57ac5afe57acull;
constexpr size_t kArena = 1 << 20;         // shared address space of one block: 20-bit offsets fit a wgmma descriptor
constexpr int kMaxWarps = 32;
constexpr int kAsync = kMaxWarps;          // the asynchronous copy engine counts as one more warp
constexpr int kAgents = kMaxWarps + 1;
constexpr size_t kMaxRegions = 64;
constexpr size_t kMaxResident = 1024;      // blocks that wait for each other: more than a GPU keeps resident
constexpr int kPollsBeforeNext = 64;
constexpr uint16_t kAsyncTid = 0xffff, kManyTid = 0xfffe;

// What no kernel does between two switches: read one cell and nothing else so often, or access memory so often (a minute).
constexpr uint32_t kSameReads = 1 << 24, kAccesses = 1 << 30;

enum State : uint8_t { READY, BLOCKED, DONE };
enum Why : uint8_t { NOTHING, IN_BARRIER, IN_WARP_OP, IN_MBARRIER, IN_GRID_BARRIER, IN_REGISTERS, NUM_WHYS };

struct Block;
struct Copy {  // cp.async, or a bulk store, not yet landed
  char *dst;
  const char *src;
  int bytes, copied, group;
  uint32_t clock;                           // of the warp, when it was issued
  bool tensor, add;
  void *pc;
  TensorMap map;
  int32_t coords[5];
};
struct Deferred { CollFn fn; int group; char arg[kDeferredBytes]; };
struct Fiber : Thread {
  void *sp;
  char *stack;
  char *top;
  Block *blk;
  uint3 tid;
  State state;
  Why why;
  int bar;                                  // barrier id, or index of the mbarrier
  uint32_t parity;
  CollFn cfn;
  void *carg;
  unsigned cmask;
  unsigned polls;                           // atomics in a row that changed nothing
  uint32_t cluster_phase;                   // of the cluster barrier, at the thread's last arrival
  std::vector<Copy> loads, stores;          // oldest first
  std::vector<Deferred> deferred;
  Local *locals;                            // innermost first
  int load_groups, store_groups, deferred_groups;
  int setmaxnregs;                          // executed so far
};
static int num_warps = 0;                   // of a block of this launch
struct Clock {
  uint32_t t[kAgents];
  void join(const Clock &o) {
    for (int i = 0; i < num_warps; ++i) if (o.t[i] > t[i]) t[i] = o.t[i];
    if (o.t[kAsync] > t[kAsync]) t[kAsync] = o.t[kAsync];
  }
};
struct Bar {
  int arrived, count;                       // of this phase; count as its first thread gave it
  Clock released;
  struct { unsigned lanes; int line; void *pc; } from[kMaxWarps];   // who of each warp has arrived, and where
};
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
  uint32_t wtime, rtime;                    // release time at the last access, for ordering through atomics
  uint32_t other_serial, other_time;        // a reader in another block of this launch
  union {
    uint32_t rpc;                           // instruction of the last read, relative to the kernel's library
    uint32_t readers;                       // index of the per-warp reader table when r.tid1 == kManyTid
  };
  uint32_t wpc;                             // instruction of the last write
  uint32_t pend_serial;
  uint16_t pend_tid;
  uint8_t pend_kind;                        // a copy in flight: 1 its target, 2 its source, 3 operand of a wgmma
  uint8_t how;                              // the last write: a How; TENSOR + the swizzle of the copy
};
static_assert(sizeof(Cell) == 64, "one cache line per granule");
struct Shadow {
  Cell *cells;
  size_t capacity;                          // cells, at granule 1
  uint32_t shift;                           // granule = 1 << shift bytes
  size_t lo, hi;                            // touched cells
  uint32_t launches;                        // over a large tensor, with this memory
};
enum How : uint8_t { PLAIN, COPIED, FENCED, TENSOR, BULK = TENSOR + 4 };   // FENCED: a copy by cp.async, fenced before it landed
struct Region {
  const char *name;
  char *base;
  size_t size;
  uint32_t elem_bits;
  Traffic *traffic;                         // null: shared memory
  Shadow *shadow;
  bool fresh;                               // undefined until written
  int planned;                              // shared: TileLang's offset, or -1
  bool overlaps;                            // ... which another buffer's overlaps
  Block *owner;                             // whose shared memory it is; null: a tensor
};
struct Named { const char *name; char *base; size_t size; uint32_t elem_bits; };
struct Flight {                             // a bulk or tensor load not yet landed
  int mbar;
  char *dst;
  const char *src;
  uint32_t bytes, clock, pc;
  bool tensor;
  TensorMap map;
  int32_t coords[5];
};
struct Readers { Stamp by[kAgents]; uint32_t time[kAgents], pc[kAgents]; };   // each warp's last read, its release time, its place
struct Block {
  uint3 bid;
  uint32_t cluster;                         // number of its cluster
  int rank;                                 // in the cluster
  uint32_t peers_from;                      // the lowest serial of a block that may reach this one's shared memory
  uint32_t peer_serial, peer_time, peer_pc; // the last access of another block to this one's shared memory
  Clock cluster_done;                       // what the last cluster barrier released
  uint32_t serial;
  int n, live;
  std::vector<Fiber *> f;
  char *stacks;
  char *marks;                              // of each stack byte: 0 not followed, 1 undefined, 2 written, 4 beside an array
  bool guarded;
  Bar bars[18];                             // 0 to 15 of the program, the grid's, the cluster's
  unsigned wlive[kMaxWarps], wwait[kMaxWarps];
  uint32_t wepoch[kMaxWarps];
  Clock knows[kAgents];                     // knows[w].t[v]: what warp w knows of warp v
  Clock proxied;                            // whose stores, up to when, a fence.proxy.async has covered
  std::vector<uint8_t> owner;               // of each planned byte: 1 + the region that wrote it last; empty without overlaps
  uint32_t now[kAgents];
  // Ordering through atomics, see fence(): up to which release time other blocks, and the block's own threads, are ordered.
  uint32_t acquired, acquired_here;
  uint32_t seen, seen_here;                 // releases read by atomics, not yet acquired
  bool fenced, fenced_here;
  char *arena;
  size_t used;
  std::vector<Region> regions;
  Shadow shadows[kMaxRegions];              // kept between blocks, one per region
  uint32_t shadow_launch[kMaxRegions];
  std::vector<Named> names;
  std::vector<MBar> mbars;
  std::vector<Flight> flights;
  int reduce_acc[3], reduce_res[3];
  int registers[kMaxWarps];                 // of a thread of each warp; 0: before the first setmaxnreg of the block
  int launch_registers, free_registers;     // of a thread at launch; given back by setmaxnreg.dec
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
struct Released { uint32_t time, time_here, serial; };   // to everybody; and to one block
static std::unordered_map<const void *, Released> released_at;
static std::vector<Readers> readers;
static std::vector<Shadow> range_shadows;
static std::vector<Region> tensors;
static std::mt19937 rng;
static int cluster_size = 1;
struct ClusterBar { int arrived; uint32_t phase; };
static std::unordered_map<uint32_t, ClusterBar> cluster_bars;
static char *last_read = nullptr;           // spins on plain memory: see check()
static uint32_t same_reads = 0, accesses = 0;
static void *hook_pc = nullptr;            // the kernel instruction whose access is being checked
static void *call_pc = nullptr;            // ... or which has called the runtime for a copy
static How write_how = PLAIN;              // what writes while a copy lands
static bool init_quiet = false, quiet_hit = false;   // look for undefined bytes without noting them
static Event events[kMaxEvents];           // the latest, as a ring
static uint32_t num_events = 0;
static void log_event(uint32_t serial, int what, int warp, int barrier, int line) {
  const Event &last = events[(num_events + kMaxEvents - 1) % kMaxEvents];
  if (num_events && last.serial == serial && last.what == what && last.warp == warp && last.barrier == barrier && what != 1) return;
  events[num_events++ % kMaxEvents] = {serial, what, warp, barrier, line};
}
struct Suspect { char *p; size_t n; unsigned char old[16]; Region *region; Stamp other; bool other_block; void *pc; uint32_t other_pc; };
static Suspect suspects[16];
static int num_suspects = 0;

// ---- failing ------------------------------------------------------------------------------------------------------
static void describe_block(Failure *f, const Block *b) {   // for the report page
  f->num_events = f->num_maps = 0;
  uint32_t first = num_events > uint32_t(kMaxEvents) ? num_events - kMaxEvents : 0;
  for (uint32_t i = first; i < num_events; ++i)
    if (events[i % kMaxEvents].serial == b->serial) f->events[f->num_events++] = events[i % kMaxEvents];
  for (const Region &r : b->regions) {
    if (f->num_maps == kMaxMaps) break;
    SharedMap &m = f->maps[f->num_maps++];
    snprintf(m.name, sizeof m.name, "%s", r.name);
    m.offset = uint32_t(r.base - b->arena); m.size = uint32_t(r.size); m.elem_bits = r.elem_bits; m.planned = uint32_t(r.planned + 1);
  }
}
static void record(const char *kind, const char *format, va_list ap) {
  if (failed) return;
  failed = true;
  num_suspects = 0;
  Failure *f = L->failure;
  snprintf(f->kind, sizeof f->kind, "%s", kind);
  vsnprintf(f->text, sizeof f->text, format, ap);
  f->has_thread = cur != nullptr;
  if (!cur) return;
  describe_block(f, cur->blk);
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
static char place_text[200];
static const char *place(const Region *r, const char *p) {
  Failure *f = L->failure;
  const char *base = r->base;
  uint32_t bits = r->elem_bits;
  bool found = false;
  snprintf(f->buffer, sizeof f->buffer, "%s", r->name);
  if (r->owner)
    for (const Named &m : r->owner->names) {
      if (p < m.base || p >= m.base + m.size) continue;
      size_t used = found ? strlen(f->buffer) : 0;
      snprintf(f->buffer + used, sizeof f->buffer - used, "%s%s", found ? "/" : "", m.name);
      if (!found) { base = m.base; bits = m.elem_bits; }
      found = true;
    }
  f->offset = p - base;
  f->element = f->offset * 8 / int64_t(bits ? bits : 8);
  char where[40] = "";
  if (r->owner && r->owner != cur->blk) snprintf(where, sizeof where, " of block %d of the cluster", r->owner->rank);
  snprintf(place_text, sizeof place_text, "%s%s%s byte %lld (element %lld)", r->owner ? "shared " : "", f->buffer, where,
           (long long)f->offset, (long long)f->element);
  return place_text;
}
