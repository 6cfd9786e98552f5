// The emulator's runtime: CUDA threads are fibers, one block at a time (or all of a cooperative grid), one OS thread.
//
// Read runtime_state.h first, then runtime_check.h (what "ordered" means), this file, runtime_async.h.
#define EMU_RUNTIME
#include "core.h"

#include <algorithm>
#include <random>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>
#include <ucontext.h>

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

#include "runtime_state.h"
#include "runtime_check.h"

// ---- fibers and the scheduler -------------------------------------------------------------------------------------
static char deadlock_text[400];
static const char kOverrun[] = "the thread overran its emulated stack of %zu KiB";
static int num_guards = 0;
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
void yield() {
  to_sched();
  if (probing) fail("deadlock", "%s", deadlock_text);   // resumed only to say where it spins
}
void polled(bool changed) {
  if (changed) { cur->polls = 0; progress = true; return; }
  unsigned n = ++cur->polls;
  if (n >= 2 && (n < 64 || n % 8 == 0)) yield();   // rarely after a while: it may be a long sequence of idle updates
}
unsigned live_lanes() { return cur->blk->wlive[cur->warp]; }

[[noreturn]] static void give_up() {   // after a noted failure
  cur->state = DONE;
  to_sched();
  abort();
}

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
  auto *top = reinterpret_cast<void **>(f->top);
  *--top = nullptr;                                                   // ends the unwinder's walk
  *--top = reinterpret_cast<void *>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  *reinterpret_cast<uint64_t *>(f->stack + kPage) = kCanary;
  f->sp = top; f->state = READY; f->why = NOTHING; f->bar = -1; f->polls = 0; f->setmaxnregs = 0;
  f->loads.clear(); f->stores.clear(); f->deferred.clear();
  f->locals = nullptr;
  f->load_groups = f->store_groups = f->deferred_groups = 0;
}
static void drop_block(Block *b) {
  if (b->arena) munmap(b->arena, kArena);
  if (b->stacks) munmap(b->stacks, kStack * size_t(b->n));
  if (b->marks) munmap(b->marks, kStack * size_t(b->n));
  if (b->guarded) num_guards -= b->n;
  for (Fiber *f : b->f) delete f;
  for (Shadow &s : b->shadows) if (s.cells) munmap(s.cells, s.capacity * sizeof(Cell));
  delete b;
}
// A page below each stack that may not be touched. Without it an overrun is still seen, by its canary, but only afterwards.
static void guard_stacks(Block *b) {
  b->guarded = num_guards + b->n <= kMaxGuards;
  if (!b->guarded) return;
  num_guards += b->n;
  for (Fiber *f : b->f) mprotect(f->stack, kPage, PROT_NONE);
}
static Block *take_block(int n) {   // nullptr and a noted failure when there is no memory
  for (size_t i = 0; i < pool.size(); ++i)
    if (pool[i]->n == n) { Block *b = pool[i]; pool.erase(pool.begin() + long(i)); return b; }
  Block *b = new Block();
  b->n = n;
  b->arena = map_memory(kArena, "the shared memory of a block");
  b->stacks = map_memory(kStack * size_t(n), "the stacks of a block");
  b->marks = map_memory(kStack * size_t(n), "the marks of a block");
  if (!b->arena || !b->stacks || !b->marks) { drop_block(b); return nullptr; }
  b->regions.reserve(kMaxRegions);
  for (int i = 0; i < n; ++i) {
    Fiber *f = new Fiber();
    f->blk = b; f->stack = b->stacks + kStack * size_t(i); f->lin = i; f->warp = i / 32; f->lane = i % 32;
    f->top = f->stack + kStack - 64 - size_t(i) * 192 % kPage;      // 16-byte aligned
    b->f.push_back(f);
  }
  guard_stacks(b);
  return b;
}
static void reset_block(Block *b, uint64_t id, uint32_t member = 0) {   // member: started as which of its cluster
  b->bid = {unsigned(id % gridDim.x), unsigned(id / gridDim.x % gridDim.y), unsigned(id / (uint64_t(gridDim.x) * gridDim.y))};
  b->serial = next_serial++;
  b->peers_from = cluster_size == 1 ? UINT32_MAX : L->cooperative ? launch_serial : b->serial - member;
  b->peer_serial = b->peer_time = b->peer_pc = 0;
  b->live = b->n;
  uint3 c = cluster_shape();
  b->rank = int(b->bid.x % c.x + b->bid.y % c.y * c.x + b->bid.z % c.z * c.x * c.y);
  b->cluster = b->bid.x / c.x + (b->bid.y / c.y + b->bid.z / c.z * (gridDim.y / c.y)) * (gridDim.x / c.x);
  b->acquired = b->acquired_here = b->seen = b->seen_here = 0;
  b->fenced = b->fenced_here = false;
  b->used = 0;
  b->regions.clear(); b->names.clear(); b->mbars.clear(); b->flights.clear();
  memset(b->bars, 0, sizeof b->bars);
  memset(&b->proxied, 0, sizeof b->proxied);
  b->owner.clear();
  b->launch_registers = b->free_registers = 0;
  memset(b->knows, 0, sizeof b->knows);
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
  same_reads = accesses = 0;
  emu_switch(&sched_sp, f->sp);
  if (f->state == DONE && *reinterpret_cast<uint64_t *>(f->stack + kPage) != kCanary && !failed) note_failure("stack", kOverrun, kStackRoom >> 10);
  cur = nullptr; self = nullptr;
}
static void land_one_flight(const std::vector<Block *> &blocks);
static bool any_flight(const std::vector<Block *> &blocks) {
  for (Block *b : blocks) if (!b->flights.empty()) return true;
  return false;
}
static void describe_deadlock(const std::vector<Fiber *> &fibers) {
  static const char *const name[] = {"nothing", "a block barrier", "a warp operation", "an mbarrier", "the barrier of the grid or the cluster",
                                     "setmaxnreg"};
  int count[NUM_WHYS] = {}, total = 0;
  for (Fiber *f : fibers) if (f->state == BLOCKED) { count[f->why]++; total++; }
  int used = snprintf(deadlock_text, sizeof deadlock_text, "deadlock: %d threads wait for ever:", total);
  const char *sep = " ";
  for (int i = 1; i < NUM_WHYS; ++i)
    if (count[i]) {
      used += snprintf(deadlock_text + used, sizeof deadlock_text - size_t(used), "%s%d in %s", sep, count[i], name[i]);
      sep = ", ";
    }
  for (Fiber *f : fibers) {
    if (f->state != BLOCKED || f->why != IN_BARRIER || used >= int(sizeof deadlock_text) - 1) continue;
    const Bar &r = f->blk->bars[f->bar];
    used += snprintf(deadlock_text + used, sizeof deadlock_text - size_t(used), "; barrier %d has %d of %d threads", f->bar, r.arrived,
                     r.count > 0 ? r.count : f->blk->live);
    break;
  }
  for (Fiber *f : fibers) {
    if (f->state != BLOCKED || f->why != IN_REGISTERS || used >= int(sizeof deadlock_text) - 1) continue;
    const Block *b = f->blk;
    used += snprintf(deadlock_text + used, sizeof deadlock_text - size_t(used),
                     "; warp %d waits for %d registers per thread and has %d; the block has %d x %d = %d registers, of which %d are free", f->warp,
                     f->bar, b->registers[f->warp], b->n, b->launch_registers, b->n * b->launch_registers, b->free_registers);
    return;                                 // the cause of whatever else waits
  }
  for (Fiber *f : fibers) {                 // what the first mbarrier of those still lacks
    if (f->state != BLOCKED || f->why != IN_MBARRIER || used >= int(sizeof deadlock_text) - 1) continue;
    const MBar &m = f->blk->mbars[size_t(f->bar)];
    const char *base = f->blk->arena, *name = "an mbarrier";
    for (const Region &r : f->blk->regions) if (m.addr >= r.base && m.addr < r.base + r.size) { name = r.name; base = r.base; }
    int length = int(strlen(name));
    if (length > 4 && !strcmp(name + length - 4, "_mem")) length -= 4;   // the array behind a barrier of the program
    snprintf(deadlock_text + used, sizeof deadlock_text - size_t(used),
             "; %.*s[%d] has completed %u phases and thread %d waits for the end of one of parity %u; the current phase lacks %u of %u arrivals and %lld bytes", length, name,
             int(m.addr - base) / 8, m.phase, f->lin, f->parity, m.pending, m.count, (long long)m.tx);
    break;
  }
}
// Runs the fibers of the resident blocks until all have ended. Copies in flight land only when nothing else can run. Where
// the blocks only poll, `start_another` brings in one more, since they may wait for it; nullptr when there is none.
template <class F> static void run_blocks(std::vector<Block *> &blocks, F start_another) {
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
      for (Fiber *f : fibers) if (f->state == BLOCKED && f->why == IN_REGISTERS) { probing = true; resume(f); probing = false; return; }
      for (Fiber *f : fibers) if (f->state == BLOCKED) { probing = true; resume(f); probing = false; return; }
    }
    if (++spins == kPollsBeforeNext) {
      if (Block *b = start_another()) {
        blocks.push_back(b);
        fibers.insert(fibers.end(), b->f.begin(), b->f.end());
        grid_live += b->n;
        resident = blocks;
        spins = 0;
        continue;
      }
    }
    if (failed) return;
    if (spins > 20000) {
      snprintf(deadlock_text, sizeof deadlock_text, "no progress: threads spin on memory that nobody writes, with %zu blocks of %llu resident",
               blocks.size(), (unsigned long long)gridDim.x * gridDim.y * gridDim.z);
      for (Fiber *f : fibers) if (f->state == READY) { probing = true; resume(f); probing = false; return; }
    }
  }
}

// ---- block and grid barriers --------------------------------------------------------------------------------------
static void wake_bar(Block *b, int id, int extra_warp) {
  Bar &r = b->bars[id];
  r.arrived = 0;
  log_event(b->serial, 1, -1, id, 0);
  for (int w = 0; w < num_warps; ++w) r.from[w].lanes = 0;
  L->barriers++;
  progress = true;
  if (id == 0) {
    memcpy(b->reduce_res, b->reduce_acc, sizeof b->reduce_res);
    b->reduce_acc[BAR_OR] = 0; b->reduce_acc[BAR_AND] = 1; b->reduce_acc[BAR_COUNT] = 0;
  }
  unsigned warps = extra_warp >= 0 ? 1u << extra_warp : 0;
  for (Fiber *f : b->f)
    if (f->state == BLOCKED && (f->why == IN_BARRIER || f->why == IN_GRID_BARRIER) && f->bar == id) {
      f->state = READY;
      f->bar = -1;
      warps |= 1u << f->warp;
    }
  for (int w = 0; w < num_warps; ++w) if (warps >> w & 1) acquire(b, w, r.released);
  memset(&r.released, 0, sizeof r.released);
}
// A barrier is an operation of whole warps: lanes that have not exited must meet the same one, in the same place.
static void note_arrival(Bar &r, int id, int count, int line, void *pc) {
  Block *b = cur->blk;
  if (r.arrived && count != r.count)
    fail("divergence", "threads meet barrier %d with different counts, %d and %d", id, count, r.count);
  r.count = count;
  auto &from = r.from[cur->warp];
  unsigned lane = 1u << cur->lane;
  if (!(from.lanes & ~lane)) log_event(b->serial, 0, cur->warp, id, line);
  if (from.lanes & lane) from.lanes = 0;                // a warp may arrive, without waiting, more than once
  if (from.lanes && from.line != line) {
    L->failure->other_pc = from.pc;
    fail("divergence", "lanes of warp %d meet barrier %d in different places", cur->warp, id);
  }
  from.lanes |= lane; from.line = line; from.pc = pc;
  if (r.arrived + 1 < (count > 0 ? count : b->live)) return;
  for (int w = 0; w < num_warps; ++w) {
    unsigned absent = r.from[w].lanes ? b->wlive[w] & ~r.from[w].lanes : 0;
    if (!absent) continue;
    fail("divergence", "barrier %d is complete without lane %d of warp %d, of which other lanes take part", id, __builtin_ctz(absent), w);
  }
}
static void bar_sync_at(int id, int count, bool wait, int line, void *pc) {
  Block *b = cur->blk;
  if (id < 0 || id > 15) fail("barrier", "barrier %d does not exist: a block has barriers 0 to 15", id);
  if (count > b->n) fail("barrier", "barrier %d waits for %d threads, the block has %d", id, count, b->n);
  Bar &r = b->bars[id];
  note_arrival(r, id, count, line, pc);
  release(b, cur->warp, r.released);
  if (++r.arrived >= (count > 0 ? count : b->live)) return wake_bar(b, id, wait ? cur->warp : -1);
  if (wait) { cur->bar = id; block_on(IN_BARRIER); }
}
void bar_sync(int id, int count, bool wait, int line) { bar_sync_at(id, count, wait, line, __builtin_return_address(0)); }
int bar_reduce(BarReduce op, int predicate, int line) {
  Block *b = cur->blk;
  int p = !!predicate, &acc = b->reduce_acc[op];
  acc = op == BAR_OR ? acc | p : op == BAR_AND ? acc & p : acc + p;
  bar_sync_at(0, 0, true, line, __builtin_return_address(0));
  return b->reduce_res[op];
}
void grid_sync() {
  if (!L->cooperative && uint64_t(gridDim.x) * gridDim.y * gridDim.z > 1) fail("barrier", "a grid barrier needs a cooperative launch");
  release(cur->blk, cur->warp, cur->blk->bars[16].released);
  if (++grid_arrived < grid_live) { cur->bar = 16; return block_on(IN_GRID_BARRIER); }
  grid_arrived = 0;
  for (Block *b : resident) {
    b->acquired = b->acquired_here = release_time;
    wake_bar(b, 16, b == cur->blk ? cur->warp : -1);
  }
  L->barriers -= resident.size() - 1;     // one barrier, however many blocks
  release_time++;
}

// ---- clusters -----------------------------------------------------------------------------------------------------
// The blocks of a cluster run together. Accesses to the shared memory of another block are checked like those to tensors: the
// clocks of two blocks are not comparable, so what the cluster barrier and arrivals at the other's mbarriers order is kept
// per block (`acquired`), which errs towards "ordered".
uint3 cluster_shape() {
  return {std::max(1u, L->cluster[0]), std::max(1u, L->cluster[1]), std::max(1u, L->cluster[2])};
}
int cluster_rank() { return cur->blk->rank; }
static Block *cluster_block(int rank) {
  for (Block *b : resident) if (b->cluster == cur->blk->cluster && b->rank == rank) return b;
  fail("out of bounds", "out of bounds: block %d of a cluster of %d", rank, cluster_size);
}
// A block that has acquired nothing from others does not know whether they have started, in whatever order they run here.
static Block *started_block(int rank, const char *what) {
  Block *b = cluster_block(rank);
  if (L->check && b != cur->blk && !cur->blk->acquired)
    fail("race", "race: %s block %d of the cluster, which may not have started: a cluster barrier must come first", what, rank);
  return b;
}
char *map_shared(const void *p, int rank) { return cluster_block(rank)->arena + smem_addr(p); }
static void complete_cluster(uint32_t cluster) {
  ClusterBar &e = cluster_bars[cluster];
  int started = 0, live = 0;
  for (Block *b : resident) if (b->cluster == cluster) { ++started; live += b->live; }
  if (!e.arrived || e.arrived < live + (cluster_size - started) * int(blockDim.x * blockDim.y * blockDim.z)) return;
  e.arrived = 0;
  e.phase++;
  L->barriers++;
  progress = true;
  for (Block *b : resident) {
    if (b->cluster != cluster) continue;
    b->cluster_done = b->bars[17].released;
    memset(&b->bars[17].released, 0, sizeof b->bars[17].released);
    b->acquired = b->acquired_here = release_time;
    for (Fiber *f : b->f) if (f->state == BLOCKED && f->bar == 17) { f->state = READY; f->bar = -1; }
  }
  release_time++;
}
void cluster_arrive() {
  Block *b = cur->blk;
  ClusterBar &e = cluster_bars[b->cluster];
  cur->cluster_phase = e.phase;
  e.arrived++;
  release(b, cur->warp, b->bars[17].released);
  complete_cluster(b->cluster);
}
void cluster_wait() {
  Block *b = cur->blk;
  if (cluster_bars[b->cluster].phase == cur->cluster_phase) { cur->bar = 17; block_on(IN_GRID_BARRIER); }
  acquire(b, cur->warp, b->cluster_done);
}

// ---- ordering through atomics -------------------------------------------------------------------------------------
// A release (memory order, or a fence before a relaxed atomic) publishes everything so far; an acquire on the same address
// (memory order, or a fence after the atomic) orders it. Kept per block, not per thread: errs towards "ordered".
static void take_seen(Block *b, bool block_only) {
  if (!block_only) b->acquired = std::max(b->acquired, b->seen);
  b->acquired_here = std::max({b->acquired_here, b->seen, b->seen_here});
}
void atomic_order(const void *p, int order) {
  if (!L->check) return;
  Block *b = cur->blk;
  auto it = released_at.find(p);
  if (it != released_at.end()) {
    b->seen = std::max(b->seen, it->second.time);
    if (it->second.serial == b->serial) b->seen_here = std::max(b->seen_here, it->second.time_here);
    if (order == 1 || order == 2 || order >= 4) take_seen(b, false);
  }
  if (order >= 3 || b->fenced) released_at[p] = {release_time, release_time, b->serial};
  else if (b->fenced_here) {
    Released &r = released_at[p];
    r.time_here = release_time; r.serial = b->serial;
  } else return;
  release_time++;
}
void fence(bool block_only) {
  if (!L->check) return;
  Block *b = cur->blk;
  (block_only ? b->fenced_here : b->fenced) = true;
  take_seen(b, block_only);
}

// ---- setmaxnreg ---------------------------------------------------------------------------------------------------
// At launch every thread has an equal share of the multiprocessor's registers, in eights. An increase waits until decreases
// of other warpgroups have given back enough: for ever, if the requests together exceed what the block has.
constexpr int kRegisters = 65536, kMaxRegisters = 256, kMinRegisters = 24;
static void start_registers(Block *b, int min_blocks) {
  if (b->launch_registers) return;
  b->launch_registers = std::min(kMaxRegisters, kRegisters / std::max(1, min_blocks) / b->n / 8 * 8);
  for (int w = 0; w < num_warps; ++w) b->registers[w] = b->launch_registers;
}
void set_registers(int count, bool increase, int min_blocks) {
  Block *b = cur->blk;
  if (count % 8 || count < kMinRegisters || count > kMaxRegisters)
    fail("registers", "setmaxnreg of %d registers: the number must be a multiple of 8 from %d to %d", count, kMinRegisters, kMaxRegisters);
  start_registers(b, min_blocks);
  cur->setmaxnregs++;
  int &own = b->registers[cur->warp];
  if (!increase && count < own) {
    b->free_registers += (own - count) * 32;
    own = count;
    progress = true;
    for (Fiber *f : b->f) if (f->state == BLOCKED && f->why == IN_REGISTERS) { f->state = READY; f->bar = -1; }
  }
  while (increase && own < count) {
    int more = (count - own) * 32;
    if (more <= b->free_registers) { b->free_registers -= more; own = count; return; }
    cur->bar = count;
    block_on(IN_REGISTERS);
  }
}
// At the end of a block: setmaxnreg is an instruction of whole warpgroups.
static void check_warpgroups(Block *b) {
  for (Fiber *f : b->f) {
    const Fiber *first = b->f[size_t(f->lin / 128 * 128)];
    if (f->setmaxnregs != first->setmaxnregs && !failed)
      fail("divergence", "threads %d and %d of one warpgroup have executed setmaxnreg %d and %d times", first->lin, f->lin, first->setmaxnregs,
           f->setmaxnregs);
  }
}

// ---- warp operations ----------------------------------------------------------------------------------------------
static void fire(Block *b, int w, unsigned lanes) {
  void *args[32] = {};
  CollFn fn = nullptr;
  unsigned mask = 0;
  for (int l = 0; l < 32; ++l) if (lanes >> l & 1) {
    Fiber *f = b->f[size_t(w * 32 + l)];
    if (!fn) { fn = f->cfn; mask = f->cmask; }
    else if (f->cfn != fn || f->cmask != mask)
      note_failure("divergence", "lanes of one warp met in different warp operations or with different masks");
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
  if (failed) give_up();
}
void defer(CollFn fn, const void *arg, size_t bytes) {
  Deferred d{fn, cur->deferred_groups, {}};
  memcpy(d.arg, arg, bytes);
  if (L->async_late) cur->deferred.push_back(d); else collective(~0u, fn, d.arg);
}
bool marks_operands() { return L->check && L->async_late; }
void mark_operand(const void *p, size_t bytes, bool on, int swizzle) { mark_pending(cur->blk, p, bytes, 3, on, swizzle); }
void proxy_fence() {
  if (!L->check) return;
  Block *b = cur->blk;
  b->proxied.join(b->knows[cur->warp]);
  uint32_t &own = b->proxied.t[cur->warp], &now = b->now[cur->warp];
  own = std::max(own, now++);
}
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
  if (!b->live && b->launch_registers) check_warpgroups(b);
  if (cluster_size > 1) {
    complete_cluster(b->cluster);
    if (!b->live && L->check) check_last_peer(b);
  }
}

// ---- shared memory ------------------------------------------------------------------------------------------------
// Each buffer has its own part of the arena with a gap on both sides, and starts as 0xFF (NaN, -1): uninitialised reads show.
static void note_overlaps(Block *b, Region &r) {
  for (Region &o : b->regions) {
    if (&o == &r || o.planned < 0 || r.planned < 0) continue;
    if (size_t(o.planned) >= size_t(r.planned) + r.size || size_t(r.planned) >= size_t(o.planned) + o.size) continue;
    o.overlaps = r.overlaps = true;
  }
  if (!r.overlaps) return;
  size_t end = 0;
  for (const Region &o : b->regions) if (o.planned >= 0) end = std::max(end, size_t(o.planned) + o.size);
  if (b->owner.size() < end) b->owner.resize(end);
}
char *shared_buf(const char *name, size_t bytes, int elem_bits, size_t align, int planned) {
  Block *b = cur->blk;
  for (Region &r : b->regions) if (r.name == name || !strcmp(r.name, name)) return r.base;
  size_t off = (b->used + 64 + align - 1) / align * align;
  if (off + bytes > kArena || b->regions.size() == kMaxRegions)
    fail("shared memory", "shared buffer %s (%zu bytes) does not fit the emulated arena", name, bytes);
  b->used = off + bytes;
  size_t slot = b->regions.size();
  Shadow &s = b->shadows[slot];
  if (L->check) {
    bool fresh = b->shadow_launch[slot] != launch_serial;
    b->shadow_launch[slot] = launch_serial;
    if (!(fresh ? shadow_start(s, bytes) : shadow_reserve(s, bytes))) give_up();
    s.lo = SIZE_MAX; s.hi = 0;
  }
  char *p = b->arena + off;
  memset(p, 0xff, bytes);
  b->regions.push_back({name, p, bytes, uint32_t(elem_bits), nullptr, &s, false, planned, false, b});
  if (L->check) note_overlaps(b, b->regions.back());
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

#include "runtime_async.h"

// ---- launch -------------------------------------------------------------------------------------------------------
static void find_image(void *inside, char *&image_lo, char *&image_hi) {
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

// ---- faults of the kernel: a failure of the launch, not the end of Python -------------------------------------------
struct Fault { int signal; const char *kind, *text; };
static constexpr Fault kFaults[] = {
    {SIGSEGV, "out of bounds", "the kernel touched address %p, which is not mapped"},
    {SIGBUS, "out of bounds", "the kernel touched address %p, which is not mapped"},
    {SIGFPE, "arithmetic", "integer division by zero, or of the smallest integer by -1"},
};
// What the CPU says of a vector access without its alignment, and of an address no memory can have.
static constexpr Fault kMisaligned{SIGSEGV, "misaligned", "the kernel used a misaligned or impossible address"};
static struct sigaction old_actions[3];
static stack_t old_stack;
static char handler_stack[64 << 10];       // the thread's own is what has just run out
static pthread_t owner;
static const Fault *fault;
static void *fault_address;

// Where a faulting thread continues: back on the fiber's stack, of which nothing is needed any more.
[[noreturn]] static void fail_at_fault() {
  char *p = static_cast<char *>(fault_address);
  Block *b = cur->blk;
  bool overrun = fault->signal == SIGSEGV && p >= b->stacks && p < b->stacks + kStack * size_t(b->n);
  if (overrun) fail("stack", kOverrun, kStackRoom >> 10);
  fail(fault->kind, fault->text, fault_address);
}
static void on_fault(int signal, siginfo_t *info, void *context) {
  size_t i = 0;
  while (kFaults[i].signal != signal) ++i;
  if (!cur || failed || !pthread_equal(owner, pthread_self())) {     // not a kernel's: let it happen again
    sigaction(signal, &old_actions[i], nullptr);
    return;
  }
  greg_t *regs = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
  fault = signal == SIGSEGV && info->si_code == SI_KERNEL ? &kMisaligned : &kFaults[i];
  fault_address = info->si_addr;
  char *pc = reinterpret_cast<char *>(regs[REG_RIP]);
  if (pc >= image_lo && pc < image_hi) hook_pc = pc + 1;             // as if it were a return address
  regs[REG_RIP] = reinterpret_cast<greg_t>(&fail_at_fault);
  regs[REG_RSP] = reinterpret_cast<greg_t>(cur->top) - 8;            // as after a call
}

// ---- requests to stop: Ctrl-C, and the alarm of a time limit ----------------------------------------------------------
// A kernel is left only where its own code runs: anywhere else (the allocator, printf) something may be half done. There
// the request is repeated until it meets the kernel. Python's handlers are put back after the launch.
static constexpr int kStops[] = {SIGINT, SIGALRM, SIGVTALRM};   // the last one repeats a request
static struct sigaction old_stops[3];
static bool catches_stops = false;
static volatile sig_atomic_t stop_signal = 0;
[[noreturn]] static void stop_kernel() {
  static const char *const doing[] = {"", "in a block barrier", "in a warp operation", "at an mbarrier", "in the grid barrier", "for registers"};
  Block *b = cur->blk;
  char text[300];
  int count[NUM_WHYS] = {}, done = 0, used = 0;
  for (Fiber *f : b->f) {
    if (f->state == DONE) ++done;
    else if (f->state == BLOCKED) ++count[f->why];
  }
  used = snprintf(text, sizeof text, "%d of its block's threads have not ended", b->n - done);
  for (int i = 1; i < NUM_WHYS; ++i)
    if (count[i]) used += snprintf(text + used, sizeof text - size_t(used), ", %d wait %s", count[i], doing[i]);
  bool limit = stop_signal != SIGINT;
  stop_signal = 0;
  fail(limit ? "timeout" : "interrupted", "%s while this thread was running; %s", limit ? "the time limit was reached" : "interrupted", text);
}
static void repeat_stop(bool on) {
  itimerval every{};
  if (on) every.it_value.tv_usec = 10000;
  setitimer(ITIMER_VIRTUAL, &every, nullptr);
}
static void on_stop(int signal, siginfo_t *, void *context) {
  if (signal != SIGVTALRM) stop_signal = signal;
  if (!stop_signal || !catches_stops || failed) return;
  if (!pthread_equal(owner, pthread_self())) { pthread_kill(owner, SIGVTALRM); return; }
  greg_t *regs = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
  char *pc = reinterpret_cast<char *>(regs[REG_RIP]);
  if (!cur || pc < image_lo || pc >= image_hi) return repeat_stop(true);
  hook_pc = pc + 1;
  regs[REG_RIP] = reinterpret_cast<greg_t>(&stop_kernel);
  regs[REG_RSP] = reinterpret_cast<greg_t>(cur->top) - 8;
}
static bool has_handler(int signal) {
  struct sigaction now{};
  sigaction(signal, nullptr, &now);
  return now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN;
}
static void catch_stops() {
  stop_signal = 0;
  catches_stops = getpid() == pid_t(syscall(SYS_gettid)) && (has_handler(SIGINT) || has_handler(SIGALRM));
  if (!catches_stops) return;
  struct sigaction action{};
  action.sa_sigaction = on_stop;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  for (size_t i = 0; i < 3; ++i)
    if (kStops[i] == SIGVTALRM || has_handler(kStops[i])) sigaction(kStops[i], &action, &old_stops[i]);
    else sigaction(kStops[i], nullptr, &old_stops[i]);
}
static void release_stops() {
  if (!catches_stops) return;
  repeat_stop(false);
  catches_stops = false;
  for (size_t i = 0; i < 3; ++i) sigaction(kStops[i], &old_stops[i], nullptr);
  if (int missed = stop_signal) { stop_signal = 0; raise(missed); }   // the kernel ended first: for Python
}
static void catch_faults() {
  owner = pthread_self();
  stack_t s{};
  s.ss_sp = handler_stack; s.ss_size = sizeof handler_stack;
  sigaltstack(&s, &old_stack);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (size_t i = 0; i < 3; ++i) sigaction(kFaults[i].signal, &action, &old_actions[i]);
}
static void release_faults() {
  for (size_t i = 0; i < 3; ++i) sigaction(kFaults[i].signal, &old_actions[i], nullptr);
  sigaltstack(&old_stack, nullptr);
}

static uint64_t block_number(uint64_t cluster, uint64_t member) {   // of the grid, counted along x first
  uint3 c = cluster_shape();
  uint64_t nx = gridDim.x / c.x, ny = gridDim.y / c.y;
  uint64_t x = cluster % nx * c.x + member % c.x, y = cluster / nx % ny * c.y + member / c.x % c.y;
  uint64_t z = cluster / (nx * ny) * c.z + member / (uint64_t(c.x) * c.y);
  return x + (y + z * gridDim.y) * gridDim.x;
}
static void run_grid(uint64_t total, int n) {
  std::vector<Block *> blocks;
  auto take = [&] {
    Block *b = take_block(n);
    if (b) blocks.push_back(b);
    return b != nullptr;
  };
  if (L->cooperative) {
    for (uint64_t i = 0; i < total && take(); ++i) reset_block(blocks.back(), i);
    if (total && !failed) run_blocks(blocks, []() -> Block * { return nullptr; });
    L->blocks = total; L->threads = total * uint64_t(n);
  } else if (total && take()) {
    std::vector<uint32_t> shuffled;
    uint64_t clusters = total / uint64_t(cluster_size);
    if (L->order == 2) {
      shuffled.resize(clusters);
      for (uint64_t i = 0; i < clusters; ++i) shuffled[i] = uint32_t(i);
      std::shuffle(shuffled.begin(), shuffled.end(), rng);
    }
    uint64_t started = 0;
    size_t used = 0;
    auto start = [&]() -> Block * {
      if (started == total || used == kMaxResident || (used == blocks.size() && !take())) return nullptr;
      uint64_t member = started % uint64_t(cluster_size), i = started++ / uint64_t(cluster_size);
      Block *b = blocks[used++];
      reset_block(b, block_number(L->order == 1 ? clusters - 1 - i : L->order == 2 ? shuffled[i] : i, member), uint32_t(member));
      L->blocks++; L->threads += uint64_t(n);
      return b;
    };
    while (started < total && !failed) {
      readers.clear();
      used = 0;
      std::vector<Block *> running;
      while (int(running.size()) < cluster_size) {
        Block *b = start();
        if (!b) break;
        running.push_back(b);
      }
      if (!failed) run_blocks(running, start);
    }
  }
  for (Block *b : blocks) if (failed) madvise(b->marks, kStack * size_t(n), MADV_DONTNEED);   // of arrays that never ended
  for (Block *b : blocks) if (pool.size() < 4) pool.push_back(b); else drop_block(b);
}
int launch(Launch *l, void (*entry)(void **), void **args) {
  L = l; entry_args = args;
  if (entry_fn != entry) find_image(reinterpret_cast<void *>(entry), image_lo, image_hi);
  if (!own_lo) find_image(&threadIdx, own_lo, own_hi);
  entry_fn = entry;
  failed = probing = false;
  cur = nullptr; self = nullptr; hook_pc = call_pc = nullptr; num_suspects = 0; any_alignment = init_quiet = false;
  write_how = PLAIN; num_events = l->num_sites = 0;
  memset(l->failure, 0, sizeof *l->failure);
  l->blocks = l->threads = l->barriers = l->warp_ops = l->async_ops = 0;
  blockDim = {l->block[0], l->block[1], l->block[2]};
  gridDim = {l->grid[0], l->grid[1], l->grid[2]};
  rng.seed(l->seed);
  launch_serial = next_serial;
  release_time = 1;
  cluster_bars.clear();
  uint3 c = cluster_shape();
  cluster_size = int(c.x * c.y * c.z);
  if (gridDim.x % c.x || gridDim.y % c.y || gridDim.z % c.z)
    note_failure("launch", "a grid of %u x %u x %u does not consist of clusters of %u x %u x %u", gridDim.x, gridDim.y, gridDim.z, c.x, c.y, c.z);
  released_at.clear();
  readers.clear();
  int n = int(blockDim.x * blockDim.y * blockDim.z);
  num_warps = (n + 31) / 32;
  uint64_t total = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
  tensors.clear();
  if (l->check) {
    if (range_shadows.size() < size_t(l->num_ranges)) range_shadows.resize(size_t(l->num_ranges));
    for (int i = 0; i < l->num_ranges; ++i) {
      Range &r = l->ranges[i];
      memset(&r.traffic, 0, sizeof r.traffic);
      if (!shadow_start(range_shadows[size_t(i)], r.size)) break;
      tensors.push_back({r.name, r.base, r.size, r.elem_bits, &r.traffic, &range_shadows[size_t(i)], r.fresh != 0, -1, false, nullptr});
    }
  }
  if (!failed) {
    catch_faults();
    catch_stops();
    run_grid(total, n);
    release_stops();
    release_faults();
  }
  take_back();
  for (Shadow &s : range_shadows) shadow_trim(s);
  resident.clear();
  tensors.clear();
  return failed;
}
}  // namespace emu

// ---- hooks: the compiler's thread-sanitizer instrumentation calls these before every access of the kernel ---------
// (Not address-sanitizer's: that one checks an address once per basic block and so misses the store of a read-modify-write.)
#define EMU_API extern "C" __attribute__((visibility("default")))
static inline void hook(void *p, size_t n, emu::Access kind, void *pc, bool aligned = true) {
  if (!emu::L || !emu::L->check) return;
  emu::hook_pc = pc;
  if (__builtin_expect(emu::stop_signal, 0)) emu::stop_kernel();
  emu::any_alignment = !aligned;
  emu::check(p, n, kind);
  emu::any_alignment = false;
  emu::hook_pc = nullptr;
}
void emu::require_aligned(const void *p, size_t n, Access kind) {
  uintptr_t address = reinterpret_cast<uintptr_t>(p);
  if (!L || !L->check || address % n == 0) return;
  hook_pc = __builtin_return_address(0);
  if (address % 16) check(const_cast<void *>(p), n < 16 ? n : 16, kind);
  fail("misaligned", "misaligned: %zu-byte access at an address that is a multiple of 16 only", n);
}
#define EMU_HOOK(N)                                                                                                          \
  EMU_API void __tsan_read##N(void *p) { hook(p, N, emu::READ, __builtin_return_address(0)); }                               \
  EMU_API void __tsan_write##N(void *p) { hook(p, N, emu::WRITE, __builtin_return_address(0)); }                             \
  EMU_API void __tsan_unaligned_read##N(void *p) { hook(p, N, emu::READ, __builtin_return_address(0), false); }              \
  EMU_API void __tsan_unaligned_write##N(void *p) { hook(p, N, emu::WRITE, __builtin_return_address(0), false); }
EMU_HOOK(1) EMU_HOOK(2) EMU_HOOK(4) EMU_HOOK(8) EMU_HOOK(16)
EMU_API void __tsan_read_range(void *p, size_t n) { hook(p, n, emu::READ, __builtin_return_address(0)); }
EMU_API void __tsan_write_range(void *p, size_t n) { hook(p, n, emu::WRITE, __builtin_return_address(0)); }
// clang copies structures and arrays by these three functions; before version 15 by the C library's, which build.py has
// the linker replace with `__wrap_...`. The alignment of the type is not among the arguments: 16 bytes are a vector.
static inline void hook_copy(void *d, const void *s, size_t n, void *pc) {
  hook(const_cast<void *>(s), n, emu::READ, pc, n == 16);
  hook(d, n, emu::WRITE, pc, n == 16);
}
#define EMU_COPY_HOOKS(PREFIX)                                                 \
  EMU_API void *PREFIX##memcpy(void *d, const void *s, size_t n) {             \
    hook_copy(d, s, n, __builtin_return_address(0));                           \
    return memcpy(d, s, n);                                                    \
  }                                                                            \
  EMU_API void *PREFIX##memmove(void *d, const void *s, size_t n) {            \
    hook_copy(d, s, n, __builtin_return_address(0));                           \
    return memmove(d, s, n);                                                   \
  }                                                                            \
  EMU_API void *PREFIX##memset(void *d, int v, size_t n) {                     \
    hook(d, n, emu::WRITE, __builtin_return_address(0), n == 16);              \
    return memset(d, v, n);                                                    \
  }
EMU_COPY_HOOKS(__tsan_) EMU_COPY_HOOKS(__wrap_)
EMU_API void __tsan_init() {}
EMU_API void __tsan_func_entry(void *) {}
EMU_API void __tsan_func_exit() {}
