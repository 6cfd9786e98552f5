// The access check: bounds, alignment, and races by vector clocks over shadow memory.
// Included by runtime.cpp inside namespace emu.
#pragma once

// ---- shadow memory ------------------------------------------------------------------------------------------------
// A granule starts at 16 bytes and shrinks when a smaller access arrives. Everything recorded before covered whole
// granules, so splitting a cell into copies of itself loses nothing.
static char *map_memory(size_t bytes, const char *what) {   // nullptr and a noted failure when there is none
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p != MAP_FAILED) return static_cast<char *>(p);
  note_failure("memory", "no address space for %s: %zu bytes", what, bytes);
  return nullptr;
}
static bool shadow_map(Shadow &s, size_t capacity) {
  if (s.cells) munmap(s.cells, s.capacity * sizeof(Cell));
  s.cells = reinterpret_cast<Cell *>(map_memory(capacity * sizeof(Cell), "the records of the checked accesses"));
  s.capacity = s.cells ? capacity : 0;
  s.launches = 0;
  return s.cells != nullptr;
}
static bool shadow_reserve(Shadow &s, size_t bytes) {
  return s.capacity >= bytes + 16 || shadow_map(s, (bytes + 16 + 4095) / 4096 * 4096);
}
// Huge pages for tensors that many launches touch. The cells of 1 MiB of a tensor are 4 MiB at the first granule; outside of
// the cache an element of a vector add takes 44 ns with huge pages and 64 ns without (1 M elements, EPYC; 42 ns in the cache).
// The first touch of such a page may cost more than it saves (there 1.4 s instead of 0.7 s for the first of launches over
// 4 M elements), hence not from the first launch on. Larger tensors are rarely touched everywhere, and each touch takes 2 MiB.
constexpr size_t kHugeFrom = 1 << 20, kHugeTo = 64 << 20;
constexpr uint32_t kHugeAfter = 3;         // launches; other values were not compared
static bool shadow_start(Shadow &s, size_t bytes) {
  s.shift = 4; s.lo = SIZE_MAX; s.hi = 0;
  if (!shadow_reserve(s, bytes)) return false;
  if (bytes < kHugeFrom || bytes > kHugeTo || ++s.launches != kHugeAfter + 1) return true;
  if (!shadow_map(s, s.capacity)) return false;         // nothing in it is needed any more
  s.launches = kHugeAfter + 1;
  madvise(s.cells, s.capacity * sizeof(Cell), MADV_HUGEPAGE);
  return true;
}
// Offer the system what a large launch touched. It takes the pages when it needs them: to give them back at once would
// cost a page fault per 64 cells in the next launch, more than the checks themselves. Old cells are recognised by their serial.
static void shadow_trim(Shadow &s) {
  if (s.hi > s.lo && (s.hi - s.lo) * sizeof(Cell) > (32u << 20)) madvise(s.cells, s.capacity * sizeof(Cell), MADV_FREE);
}
static void shadow_split(Shadow &s, uint32_t shift) {
  if (s.hi > s.lo) {
    uint32_t k = s.shift - shift;
    for (size_t i = s.hi; i-- > s.lo;) {
      Cell c = s.cells[i];
      for (size_t j = size_t(1) << k; j-- > 0;) {
        Cell &d = s.cells[(i << k) + j] = c;
        if (c.r.tid1 != kManyTid || c.r.serial < launch_serial || !j) continue;
        readers.push_back(Readers(readers[c.readers]));   // each part gets a table of its own
        d.readers = uint32_t(readers.size() - 1);
      }
    }
    for (size_t i = s.lo, end = std::min(s.hi, s.lo << k); i < end; ++i) s.cells[i] = Cell{};   // now of other bytes
    s.lo <<= k; s.hi <<= k;
  }
  s.shift = shift;
}

// ---- order --------------------------------------------------------------------------------------------------------
// Warps carry vector clocks. Arriving at a barrier releases, leaving it acquires. Lanes of one warp are ordered by warp
// operations and by whatever their warp has acquired. All approximations are towards "ordered": no false reports.
static void release(Block *b, int warp, Clock &into) {
  into.join(b->knows[warp]);
  if (b->now[warp] > into.t[warp]) into.t[warp] = b->now[warp];
  b->now[warp]++;
}
static void acquire(Block *b, int warp, const Clock &from) {
  b->knows[warp].join(from);
  b->wepoch[warp]++;
}
static bool ordered(const Stamp &s, uint32_t time, const Fiber *f) {   // within one block
  const Block *b = f->blk;
  if (!s.tid1 || time <= b->acquired_here) return true;
  int v = s.tid1 == kAsyncTid ? kAsync : (s.tid1 - 1) >> 5;
  if (v == f->warp) return (!s.multi && s.tid1 - 1 == f->lin) || s.wepoch != b->wepoch[v];
  return b->knows[f->warp].t[v] >= s.clock;
}
constexpr int kOtherValue = 0x47;   // 51015 as float, 50944 as bfloat16; the usual one is 0xff, NaN
static const char *place(const Region *r, const char *p);
static Stamp stamp(const Fiber *f, bool atomic) {
  const Block *b = f->blk;
  return {b->serial, b->now[f->warp], b->wepoch[f->warp], uint16_t(f->lin + 1), uint8_t(atomic), 0};
}
static char *image_lo = nullptr, *image_hi = nullptr;   // the kernel's own library
static char *own_lo = nullptr, *own_hi = nullptr;       // the runtime's: clang also reports reads of threadIdx
static uint32_t short_pc() {
  char *pc = static_cast<char *>(hook_pc ? hook_pc : call_pc);
  return pc >= image_lo && pc < image_hi ? uint32_t(pc - image_lo) : 0;
}
static bool same_epoch(const Stamp &a, const Stamp &b) { return a.wepoch == b.wepoch && (a.tid1 - 1) >> 5 == (b.tid1 - 1) >> 5; }

static const char *const kVerb[] = {"read of", "write to", "atomic on", "atomic read of"};
static const char *describe(char *out, size_t n, const Stamp &s, bool other_block) {
  if (other_block) snprintf(out, n, "another block (number %u of the launch)", s.serial - launch_serial);
  else if (s.tid1 == kAsyncTid) snprintf(out, n, "an asynchronous copy");
  else if (s.multi && s.tid1 - 1 == cur->lin) snprintf(out, n, "another thread of its warp");   // and later by itself
  else snprintf(out, n, "thread %d", s.tid1 - 1);
  return out;
}
[[noreturn]] static void race(const Region *r, char *p, size_t n, Access kind, const Stamp &s, bool other_block, bool was_write,
                              uint32_t other_pc, const char *extra = "") {
  char who[80];
  L->failure->other_pc = other_pc ? image_lo + other_pc : nullptr;
  describe(who, sizeof who, s, other_block);
  fail("race", "race: %zu-byte %s %s, %s by %s with no %s in between%s", n, kVerb[kind], place(r, p), was_write ? "written" : "read", who,
       !other_block ? "barrier" : r->owner ? "cluster barrier" : "grid barrier", extra);
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

// Readers that this block has acquired (through atomics) are as good as gone: only later ones can conflict.
static void add_reader(Cell &c, const Fiber *f, const Stamp &me) {
  Block *b = f->blk;
  Stamp &r = c.r;
  if (c.rtime <= b->acquired_here) { r = me; c.rpc = short_pc(); return; }
  if (r.tid1 == kManyTid) {
    Readers &t = readers[c.readers];
    Stamp &e = t.by[f->warp];
    if (t.time[f->warp] <= b->acquired_here) e = Stamp{};
    bool multi = e.tid1 && same_epoch(e, me) && (e.multi || e.tid1 != me.tid1);
    bool atomic = me.atomic && (!e.tid1 || e.atomic);
    e = me; e.multi = multi; e.atomic = atomic;
    t.time[f->warp] = release_time; t.pc[f->warp] = short_pc();
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
  if (!r.tid1 || b->knows[f->warp].t[v] >= r.clock) { r = me; c.rpc = short_pc(); return; }
  readers.push_back(Readers{});
  Readers &t = readers.back();
  t.by[v] = r; t.time[v] = c.rtime; t.pc[v] = c.rpc;
  t.by[f->warp] = me; t.time[f->warp] = release_time; t.pc[f->warp] = short_pc();
  c.readers = uint32_t(readers.size() - 1);
  r.tid1 = kManyTid;
}

struct Lent { const Region *region; size_t offset, bytes; };
static std::vector<Lent> lent;                          // tensor bytes with another value than 0xff, by note_undefined
static void take_back() {
  for (const Lent &x : lent) {
    if (!x.region->traffic) continue;
    for (size_t i = x.offset; i < x.offset + x.bytes; ++i) {
      const Cell &c = x.region->shadow->cells[i >> x.region->shadow->shift];
      if (!(c.w.tid1 && c.w.serial >= launch_serial)) x.region->base[i] = char(0xff);
    }
  }
  lent.clear();
}
// A read of bytes that nobody has written. Whether the value matters only other values can tell: the host runs the launch
// again, in which the reads of one instruction (`blamed`) get other ones.
static void note_undefined(const Region *r, char *p, size_t n, Access kind) {
  if (init_quiet) { quiet_hit = true; return; }
  uint32_t pc = short_pc();
  if (!pc) pc = ~0u;
  if (L->blamed == pc) {
    if (L->strict) fail("uninitialised", "uninitialised: %zu-byte %s %s, which no thread has written", n, kVerb[kind], place(r, p));
    memset(p, kOtherValue, n);
    lent.push_back({r, size_t(p - r->base), n});
    return;
  }
  for (uint32_t i = 0; i < L->num_sites; ++i) if (L->sites[i] == pc) return;
  if (L->num_sites < uint32_t(kMaxSites)) L->sites[L->num_sites++] = pc;
}
// The async proxy (wgmma, bulk and tensor stores) sees ordinary stores, and copies by cp.async, only after a
// fence.proxy.async. Stores that no barrier orders are left to the race check.
static void check_proxy(const Cell &c, const Region *r, char *p, size_t n, const char *reader) {
  Block *b = cur->blk;
  if (c.how > COPIED || !c.w.tid1 || c.w.tid1 == kAsyncTid || c.w.serial != b->serial) return;
  if (c.w.clock <= b->proxied.t[(c.w.tid1 - 1) >> 5] || !ordered(c.w, c.wtime, cur)) return;
  L->failure->other_pc = c.wpc ? image_lo + c.wpc : nullptr;
  fail("fence", "missing fence: %s reads %zu bytes of %s, written by thread %d with no fence.proxy.async in between", reader, n, place(r, p),
       c.w.tid1 - 1);
}

static void check_cell(Cell &c, Region *r, char *p, size_t n, Access kind, Fiber *f) {
  Block *b = f->blk;
  bool global = !r->owner, write = kind == WRITE || kind == ATOMIC, atomic = kind >= ATOMIC;
  if (!global && c.pend_kind && c.pend_serial == r->owner->serial) {
    bool mine = c.pend_kind == 1 && write && c.pend_tid == uint16_t(f->lin + 1);
    static const char *const role[] = {"", "the target of an asynchronous copy", "the source of an asynchronous copy", "an operand of a wgmma"};
    if (!(c.pend_kind >= 2 && !write) && !mine) {
      uint32_t pc = c.pend_kind == 1 ? c.wpc : c.pend_kind == 2 && c.r.tid1 != kManyTid ? c.rpc : 0;
      L->failure->other_pc = pc ? image_lo + pc : nullptr;
      fail("race", "race: %zu-byte %s %s, %s of thread %d not yet waited for", n, kVerb[kind], place(r, p), role[c.pend_kind], c.pend_tid - 1);
    }
  }
  // Stamps of other blocks, from serial `since` on, are concurrent unless an acquire covers them. Older ones are of launches
  // before; in shared memory, of blocks that had this memory before.
  uint32_t since = global ? launch_serial : b->peers_from;
  bool w_here = c.w.tid1 && c.w.serial == b->serial, r_here = c.r.tid1 && c.r.serial == b->serial;
  bool w_else = c.w.tid1 && !w_here && c.w.serial >= since && c.wtime > b->acquired;
  bool bad_w = ((w_here && !ordered(c.w, c.wtime, f)) || w_else) && !(atomic && c.w.atomic);
  if (bad_w) {
    if (kind != WRITE || c.w.atomic) race(r, p, n, kind, c.w, w_else, true, c.wpc);
    if (num_suspects < 16) {
      Suspect &x = suspects[num_suspects++] = {p, n, {}, r, c.w, w_else, hook_pc, c.wpc};
      memcpy(x.old, p, n);
    }
  }
  if (kind != WRITE && (!global || r->fresh) && !w_here && !(c.w.tid1 && c.w.serial >= since)) note_undefined(r, p, n, kind);
  if (write) {
    if (r_here && c.r.tid1 == kManyTid) {
      const Readers &t = readers[c.readers];
      for (int v = 0; v < kAgents; ++v)
        if (t.by[v].tid1 && !(atomic && t.by[v].atomic) && !ordered(t.by[v], t.time[v], f)) race(r, p, n, kind, t.by[v], false, false, t.pc[v]);
    } else if (r_here && !(atomic && c.r.atomic) && !ordered(c.r, c.rtime, f)) race(r, p, n, kind, c.r, false, false, c.rpc);
    bool r_else = c.r.tid1 && !r_here && c.r.serial >= since && c.rtime > b->acquired;
    if (r_else && !(atomic && c.r.atomic)) race(r, p, n, kind, c.r, true, false, c.r.tid1 == kManyTid ? 0 : c.rpc);
    if (c.other_serial >= since && c.other_serial != b->serial && c.other_time > b->acquired && !atomic) {
      Stamp s{}; s.serial = c.other_serial; s.tid1 = 1;
      race(r, p, n, kind, s, true, false, 0);
    }
  }
  Stamp me = stamp(f, atomic);
  size_t granule = size_t(1) << r->shadow->shift;
  if (write) {
    if (r->traffic && !(c.w.tid1 && c.w.serial >= launch_serial)) r->traffic->distinct_written += granule;
    me.multi = w_here && same_epoch(c.w, me) && (c.w.multi || c.w.tid1 != me.tid1);
    c.w = me; c.wtime = release_time; c.wpc = short_pc(); c.how = write_how;
  }
  if (!write || kind == ATOMIC) {
    if (r->traffic && !(c.r.tid1 && c.r.serial >= launch_serial)) r->traffic->distinct_read += granule;
    if (kind == ATOMIC) { if (!r_here) { c.r = me; c.r.multi = 0; c.rtime = release_time; c.rpc = short_pc(); } return; }
    if (!r_here) {
      if (c.r.tid1 && c.r.serial >= since) { c.other_serial = c.r.serial; c.other_time = c.rtime; }
      c.r = me; c.rpc = short_pc();
    } else add_reader(c, f, me);
    c.rtime = release_time;
  }
}

// ---- the access check ---------------------------------------------------------------------------------------------
static Region *find_shared(Block *b, char *p, size_t n) {
  for (Region &r : b->regions) if (p >= r.base && p + n <= r.base + r.size) return &r;
  return nullptr;
}
// Buffers have memory of their own here; TileLang gives those that it thinks are not in use together the same bytes.
static void check_overlap(const Region *r, size_t off, size_t n, Access kind) {
  Block *b = r->owner;
  uint8_t me = uint8_t(r - b->regions.data() + 1), *owner = b->owner.data() + r->planned + off;
  if (kind == READ || kind == ATOMIC_READ) {
    for (size_t i = 0; i < n; ++i) {
      if (owner[i] == me || !owner[i]) continue;
      const Cell &c = r->shadow->cells[(off + i) >> r->shadow->shift];
      if (!(c.w.tid1 && (c.w.serial == b->serial || c.w.serial >= b->peers_from))) return;   // not written at all: noted already
      const Region &other = b->regions[owner[i] - 1];
      fail("shared memory", "overlap: %zu-byte %s %s, whose bytes %s has overwritten (%s is at bytes %d to %zu of shared memory, %s at %d to %zu)", n,
           kVerb[kind], place(r, r->base + off), other.name, r->name, r->planned, size_t(r->planned) + r->size - 1, other.name, other.planned,
           size_t(other.planned) + other.size - 1);
    }
    return;
  }
  memset(owner, me, n);
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
  if (r->overlaps) check_overlap(r, off, n, kind);
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
// ---- arrays of one thread ----------------------------------------------------------------------------------------
static uint32_t name_site(const char *name) {            // such sites are arrays, not instructions
  uint32_t h = 2166136261u;
  for (; *name; ++name) h = (h ^ uint8_t(*name)) * 16777619u;
  return h | 0x80000000u;
}
static void note_undefined_local(Fiber *f, char *p, size_t n) {
  const Local *a = f->locals;
  while (a && !(p >= a->base && p < a->base + a->bytes)) a = a->outer;
  if (!a) return;
  uint32_t site = name_site(a->name);
  if (L->blamed == site && L->strict) {
    snprintf(L->failure->buffer, sizeof L->failure->buffer, "%s", a->name);
    L->failure->offset = p - a->base;
    L->failure->element = L->failure->offset / a->elem_bytes;
    fail("uninitialised", "uninitialised: %zu-byte read of the thread's own %s byte %lld (element %lld), which it has not written", n, a->name,
         (long long)L->failure->offset, (long long)L->failure->element);
  }
  for (uint32_t i = 0; i < L->num_sites; ++i) if (L->sites[i] == site) return;
  if (L->num_sites < uint32_t(kMaxSites)) L->sites[L->num_sites++] = site;
}
[[noreturn]] static void beside_local(Fiber *f, char *p, size_t n, Access kind) {
  const Local *a = f->locals;
  while (a && !(p + n > a->base - Local::kMargin && p < a->base + a->bytes + Local::kMargin)) a = a->outer;
  Failure *x = L->failure;
  x->offset = a ? p - a->base : 0;
  x->element = a ? (x->offset < 0 ? x->offset - int64_t(a->elem_bytes) + 1 : x->offset) / int64_t(a->elem_bytes) : 0;
  snprintf(x->buffer, sizeof x->buffer, "%s", a ? a->name : "array");
  fail("out of bounds", "out of bounds: %zu-byte %s the thread's own %s byte %lld (element %lld); it has %u bytes", n, kVerb[kind], x->buffer,
       (long long)x->offset, (long long)x->element, a ? a->bytes : 0);
}
static inline void check_local(Fiber *f, char *p, size_t n, Access kind) {
  char *m = f->blk->marks + (p - f->blk->stacks), any = 0;
  for (size_t i = 0; i < n; ++i) any |= m[i];
  if (!any) return;
  if (any & 4) beside_local(f, p, n, kind);
  if (kind == WRITE) memset(m, 2, n);
  else if (any & 1) note_undefined_local(f, p, n);
}
void Local::begin() {
  outer = cur->locals;
  cur->locals = this;
  memset(base, L->blamed == name_site(name) ? kOtherValue : 0xff, bytes);
  char *m = cur->blk->marks + (base - cur->blk->stacks);
  memset(m - kMargin, 4, kMargin);
  memset(m, 1, bytes);
  memset(m + bytes, 4, kMargin);
}
void Local::end() {
  cur->locals = outer;
  memset(cur->blk->marks + (base - cur->blk->stacks) - kMargin, 0, bytes + 2 * kMargin);
}
void defined(const void *p, size_t bytes) {
  const char *q = static_cast<const char *>(p);
  Block *b = cur->blk;
  if (L->check && q >= b->stacks && q < b->stacks + kStack * size_t(b->n)) check_local(cur, const_cast<char *>(q), bytes, WRITE);
}

// An access to the shared memory of another block of the cluster, which must have started and must not have ended.
static void check_peer(Block *o, char *p, size_t n, Access kind, Fiber *f) {
  static const char *const text = "race: %zu-byte %s shared memory of block %d of the cluster, which %s: a cluster barrier must come %s";
  if ((o->regions.empty() && o->live) || !f->blk->acquired) fail("race", text, n, kVerb[kind], o->rank, "may not have started", "first");
  if (!o->live) fail("race", text, n, kVerb[kind], o->rank, "has ended", "before its end");
  Region *r = find_shared(o, p, n);
  if (!r) fail("out of bounds", "out of bounds: %zu-byte %s shared memory of block %d of the cluster", n, kVerb[kind], o->rank);
  o->peer_serial = f->blk->serial; o->peer_time = release_time; o->peer_pc = short_pc();
  check_region(r, p, n, kind, f);
}
// At the end of a block: are the others done with its shared memory?
static void check_last_peer(Block *b) {
  if (b->peer_serial < b->peers_from || b->peer_time <= b->acquired || failed) return;
  hook_pc = b->peer_pc ? image_lo + b->peer_pc : nullptr;
  fail("race", "race: the block ends although another block (number %u of the launch) has accessed its shared memory with no cluster barrier in between",
       b->peer_serial - launch_serial);
}

static void check(const void *ptr, size_t n, Access kind) {
  Fiber *f = cur;
  char *p = const_cast<char *>(static_cast<const char *>(ptr));
  if (!f || failed || !n) return;
  if (p >= f->stack && p < f->stack + kStack) return check_local(f, p, n, kind);
  if (num_suspects) settle_suspects();
  if (kind != READ || p != last_read) same_reads = 0;
  last_read = p;
  if (++same_reads > kSameReads || ++accesses > kAccesses)
    fail("deadlock", "no progress: the thread spins on plain memory (wait with atomics, which let other threads run)");
  Block *b = f->blk;
  bool shared = p >= b->arena && p < b->arena + kArena;
  if (shared) {
    if (Region *r = find_shared(b, p, n)) return check_region(r, p, n, kind, f);
  } else {
    for (Region &r : tensors) if (p >= r.base && p + n <= r.base + r.size) return check_region(&r, p, n, kind, f);
    if (cluster_size > 1)
      for (Block *o : resident)
        if (o->cluster == b->cluster && p >= o->arena && p < o->arena + kArena) return check_peer(o, p, n, kind, f);
    if (p >= image_lo && p < image_hi) return;                        // constants of the kernel itself
    if (p >= own_lo && p < own_hi && kind == READ) return;
    if (p >= b->stacks && p < b->stacks + kStack * size_t(b->n)) return;  // a collective writes its peers' registers
  }
  const Region *near = shared ? nearest(b->regions, p) : nearest(tensors, p);
  if (!near)
    fail("out of bounds", "out of bounds: %zu-byte %s %s, and the kernel has none", n, kVerb[kind],
         shared ? "shared memory" : "global memory");
  fail("out of bounds", "out of bounds: %zu-byte %s %s; it has %zu bytes", n, kVerb[kind], place(near, p), near->size);
}
void access(const void *p, size_t n, Access kind) { if (L->check) check(p, n, kind); }
void global_only(const void *q, size_t n, const char *what) {
  char *p = static_cast<char *>(const_cast<void *>(q));
  if (Region *r = L->check ? find_shared(cur->blk, p, n) : nullptr)
    fail("address space", "%s of shared memory (%s): it is an instruction for global memory", what, place(r, p));
}

// The shadow of `n` bytes of shared memory, in cells that they fill; empty outside of all buffers.
struct Cells { Shadow *shadow = nullptr; size_t first = 0, end = 0; };
static Cells shared_cells(Block *b, char *p, size_t n) {
  Region *r = find_shared(b, p, n);
  if (!r) return {};
  Shadow &s = *r->shadow;
  size_t off = size_t(p - r->base);
  uint32_t fits = uint32_t(__builtin_ctzll(off | n));
  if (fits < s.shift) shadow_split(s, fits);
  return {&s, off >> s.shift, ((off + n - 1) >> s.shift) + 1};
}
// What the async proxy is about to read: fenced, and in the layout in which it was written?
static void check_async_read(const Cell &c, char *p, size_t n, uint8_t kind, int mode) {
  Block *b = cur->blk;
  Region *r = find_shared(b, p, n);
  check_proxy(c, r, p, n, kind == 3 ? "a wgmma" : "a bulk store");
  if (kind != 3 || mode < 0 || c.w.tid1 != kAsyncTid || c.w.serial != b->serial || c.how < TENSOR || c.how == BULK) return;
  int wanted = mode == 1 ? 3 : mode == 2 ? 2 : mode == 3 ? 1 : 0, found = c.how - TENSOR;   // a descriptor counts downwards
  if (wanted == found) return;
  static const char *const name[] = {"no swizzle", "the 32-byte swizzle", "the 64-byte swizzle", "the 128-byte swizzle"};
  L->failure->other_pc = c.wpc ? image_lo + c.wpc : nullptr;
  fail("layout", "layout mismatch: a wgmma reads %s with %s, the tensor copy wrote it with %s", place(r, p), name[wanted], name[found]);
}
// Copies in flight: their target may not be touched, their source may not be written.
static void mark_pending(Block *b, const void *ptr, size_t n, uint8_t kind, bool on, int swizzle = -1) {
  if (!L->check || !n) return;
  char *p = const_cast<char *>(static_cast<const char *>(ptr));
  Cells r = shared_cells(b, p, n);
  if (!r.shadow) return;
  Shadow &s = *r.shadow;
  s.lo = std::min(s.lo, r.first);
  s.hi = std::max(s.hi, r.end);
  for (size_t i = r.first; i < r.end; ++i) {
    Cell &c = s.cells[i];
    if (on && kind >= 2) check_async_read(c, p, n, kind, swizzle);
    // An operand mark must not hide that a copy into the same place is still in flight.
    if (kind == 3 && c.pend_serial == b->serial && c.pend_kind && c.pend_kind != 3) continue;
    c.pend_serial = b->serial; c.pend_tid = uint16_t(cur->lin + 1); c.pend_kind = on ? kind : 0;
  }
}
// The copy engine has written: later accesses must have acquired `clock` through the mbarrier.
static void stamp_async(Block *b, char *p, size_t n, uint32_t clock, uint32_t pc, How how) {
  if (!L->check) return;
  Cells r = shared_cells(b, p, n);
  if (Region *x = find_shared(b, p, n)) if (x->overlaps) check_overlap(x, size_t(p - x->base), n, WRITE);
  for (size_t i = r.first; i < r.end; ++i) {
    Cell &c = r.shadow->cells[i];
    c.w = {b->serial, clock, 0, kAsyncTid, 0, 0};
    c.wpc = pc;
    c.how = how;
    c.wtime = release_time;
    c.pend_kind = 0;
  }
}
