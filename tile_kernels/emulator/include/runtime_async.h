// Copies that complete later: cp.async, mbarriers, bulk and tensor copies.
// Included by runtime.cpp inside namespace emu.
#pragma once

// ---- cp.async -----------------------------------------------------------------------------------------------------
struct Caller {            // names the generated line that a copy belongs to
  explicit Caller(void *pc) { call_pc = pc; }
  ~Caller() { call_pc = nullptr; }
};
struct Writing {           // what the checked writes of a scope are
  explicit Writing(How how) { write_how = how; }
  ~Writing() { write_how = PLAIN; }
};
// Whether wgmma may read a copy without a further fence.proxy.async. TileLang's pipelines have the fence of one iteration
// between the issue of the next one's copies and their wait, and none after the last wait; where an mbarrier tells of the
// copies, they have none at all. Both are let off.
static How fenced(const Copy &c, bool by_mbarrier) {
  return by_mbarrier || cur->blk->proxied.t[cur->warp] >= c.clock ? FENCED : COPIED;
}
static void land_copy(const Copy &c, bool by_mbarrier = false) {
  Writing copied(fenced(c, by_mbarrier));
  Caller from(c.pc);
  if (L->async_late) mark_pending(cur->blk, c.dst, size_t(c.bytes), 1, false);
  access(c.dst, size_t(c.bytes), WRITE);
  if (c.copied) { access(c.src, size_t(c.copied), READ); memcpy(c.dst, c.src, size_t(c.copied)); }
  memset(c.dst + c.copied, 0, size_t(c.bytes - c.copied));
}
void cp_async(void *dst, const void *src, int bytes, int copied) {
  Fiber *f = cur;
  Copy c{};
  c.pc = __builtin_return_address(0);
  Writing by_copy(COPIED);
  Caller from(c.pc);
  c.dst = static_cast<char *>(dst); c.src = static_cast<const char *>(src); c.bytes = bytes; c.copied = copied; c.group = f->load_groups;
  c.clock = f->blk->now[f->warp];
  L->async_ops++;
  if (!L->async_late) return land_copy(c);
  access(dst, size_t(bytes), WRITE);                    // the write may happen from here on ...
  mark_pending(cur->blk, dst, size_t(bytes), 1, true);            // ... until the wait
  f->loads.push_back(c);
}
void cp_commit() { cur->load_groups++; }
static void land_copies(int keep, bool by_mbarrier) {   // all but the newest `keep` committed groups
  Fiber *f = cur;
  size_t i = 0;
  while (i < f->loads.size() && f->loads[i].group < f->load_groups - keep) land_copy(f->loads[i++], by_mbarrier);
  f->loads.erase(f->loads.begin(), f->loads.begin() + long(i));
}
void cp_wait(int keep) { land_copies(keep, false); }

// ---- mbarrier -----------------------------------------------------------------------------------------------------
static int mbar_index(Block *b, void *bar) {
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
  log_event(b->serial, 1, -1, 100 + index, 0);
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
static int mbar_index(void *bar) { return mbar_index(cur->blk, bar); }
static void mbar_arrive_at(Block *b, void *bar, uint32_t expect_tx, bool arrive) {
  int i = mbar_index(b, bar);
  access(bar, 8, ATOMIC);
  MBar &m = b->mbars[size_t(i)];
  m.tx += expect_tx;
  if (!arrive) return;
  if (!m.pending) fail("barrier", "more arrivals on an mbarrier than its count of %u in one phase", m.count);
  m.pending--;
  log_event(b->serial, 0, cur->warp, 100 + i, 0);
  if (b == cur->blk) release(b, cur->warp, m.current);
  else b->acquired = b->acquired_here = release_time++;   // from another block of the cluster: errs towards "ordered"
  mbar_complete(b, i);
}
void mbar_arrive(void *bar, uint32_t expect_tx, bool arrive) { mbar_arrive_at(cur->blk, bar, expect_tx, arrive); }
void mbar_arrive_remote(void *bar, int rank, uint32_t expect_tx) {
  Block *b = started_block(rank, "an arrival at a barrier of");
  mbar_arrive_at(b, b->arena + smem_addr(bar), expect_tx, true);
}
// Arrives once the thread's earlier cp.async copies are complete; without noinc the phase also expects one arrival more.
void mbar_cp_async_arrive(void *bar, bool noinc) {
  cp_commit();
  land_copies(0, true);
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
    if (cur->lane == 0) log_event(cur->blk->serial, 2, cur->warp, 100 + cur->bar, 0);
    block_on(IN_MBARRIER);
  }
}

// ---- bulk and tensor copies ---------------------------------------------------------------------------------------
// Visits the box of a tensor map element by element: visit(shared offset, global address or nullptr when outside).
template <class F> static void for_pixels(const TensorMap &m, const int32_t *coords, uint32_t smem_base, uint32_t bits, F visit) {
  int spatial = m.rank - 2;
  int64_t at[4];                                          // w, h, ..., n of a pixel; it walks through the pixel box
  for (int d = 0; d < m.rank - 1; ++d) at[d] = coords[1 + d];
  uint32_t off = smem_base;
  for (int p = 0; p < m.box[1]; ++p) {
    char *pixel = m.base + at[spatial] * m.strides[m.rank - 1];
    bool inside = at[spatial] >= 0 && at[spatial] < m.dims[m.rank - 1];
    for (int d = 0; d < spatial; ++d) {
      int64_t x = at[d] + m.offset[d];
      inside &= x >= 0 && x < m.dims[1 + d];
      pixel += x * m.strides[1 + d];
    }
    for (int c = 0; c < m.box[0]; ++c, off += uint32_t(m.elem_bytes)) {
      int64_t channel = int64_t(coords[0]) + c;
      bool valid = inside && channel >= 0 && channel < m.dims[0];
      visit(off ^ ((off >> 7 & bits) << 4), valid ? pixel + channel * m.elem_bytes : nullptr);
    }
    for (int d = 0; d <= spatial; ++d) {                  // the next pixel: w first, the image last
      at[d] += d < spatial ? m.steps[1 + d] : 1;
      if (d == spatial || at[d] <= m.dims[1 + d] - 1 + m.upper[d]) break;
      at[d] = m.lower[d];
    }
  }
}
template <class F> static void for_box(const TensorMap &m, const int32_t *coords, uint32_t smem_base, F visit) {
  uint32_t bits = m.swizzle == 3 ? 7 : m.swizzle == 2 ? 3 : m.swizzle == 1 ? 1 : 0;
  if (m.im2col) return for_pixels(m, coords, smem_base, bits, visit);
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
  for (int d = 0; d < (m.im2col ? 2 : m.rank); ++d) n *= uint32_t(m.box[d]);
  return n;
}
static void require_aligned(uint32_t smem, uint32_t align, const char *what) {
  if (smem % align)
    fail("misaligned", "misaligned: the shared side of %s is at byte %u of shared memory, it needs %u-byte alignment", what,
         smem, align);
}
static void land_flight(Block *b, const Flight &x) {
  if (x.tensor)
    for_box(x.map, x.coords, uint32_t(x.dst - b->arena), [&](uint32_t s, char *g) {
      if (g) memcpy(b->arena + s, g, size_t(x.map.elem_bytes)); else memset(b->arena + s, 0, size_t(x.map.elem_bytes));
    });
  else memcpy(x.dst, x.src, x.bytes);
  stamp_async(b, x.dst, x.bytes, x.clock, x.pc, x.tensor ? How(TENSOR + x.map.swizzle) : BULK);
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
static void start_flight(Flight &x, Block *b) {
  L->async_ops++;
  x.pc = short_pc();
  auto before = std::make_tuple(b->peer_serial, b->peer_time, b->peer_pc);
  access(x.dst, x.bytes, WRITE);                        // the target must be free, as seen by the issuing thread
  std::tie(b->peer_serial, b->peer_time, b->peer_pc) = before;  // an mbarrier of that block, not a cluster barrier, says when it is done
  mark_pending(b, x.dst, x.bytes, 1, true);
  b->now[kAsync]++;
  x.clock = b->now[kAsync];
  if (L->async_late) b->flights.push_back(x); else land_flight(b, x);
}
// Into the block's own shared memory, or with a mask of ranks into the same place of other blocks of the cluster.
static void start_flights(Flight x, void *bar, unsigned multicast) {
  Block *own = cur->blk;
  uint32_t to = smem_addr(x.dst), at = smem_addr(bar);
  for (int rank = 0; rank < cluster_size; ++rank) {
    if (multicast && !(multicast >> rank & 1)) continue;
    Block *b = multicast ? started_block(rank, "a multicast copy to") : own;
    x.dst = b->arena + to;
    x.mbar = mbar_index(b, b->arena + at);
    start_flight(x, b);
    if (!multicast) return;
  }
}
struct AnyAlignment { AnyAlignment() { any_alignment = true; } ~AnyAlignment() { any_alignment = false; } };

void cluster_store(void *dst, const void *src, int rank, uint32_t bytes, void *bar) {
  Caller from(__builtin_return_address(0));
  Flight x{};
  x.dst = static_cast<char *>(dst); x.src = static_cast<const char *>(src); x.bytes = bytes;
  access(src, bytes, READ);
  mbar_arrive_remote(bar, rank, bytes);
  start_flights(x, bar, 1u << rank);
}
void bulk_load(void *dst, const void *src, uint32_t bytes, void *bar, unsigned multicast) {
  Caller from(__builtin_return_address(0));
  Flight x{};
  x.dst = static_cast<char *>(dst); x.src = static_cast<const char *>(src); x.bytes = bytes;
  require_aligned(smem_addr(dst), 16, "a bulk copy");
  if (bytes % 16 || reinterpret_cast<uintptr_t>(src) % 16)
    fail("misaligned", "misaligned: a bulk copy of %u bytes needs 16-byte address and size", bytes);
  access(src, bytes, READ);
  start_flights(x, bar, multicast);
}
void tensor_load(const TensorMap &map, void *dst, void *bar, const int32_t *coords, unsigned multicast) {
  Caller from(__builtin_return_address(0));
  Flight x{};
  x.dst = static_cast<char *>(dst); x.bytes = box_bytes(map); x.tensor = true; x.map = map;
  memcpy(x.coords, coords, sizeof(int32_t) * size_t(map.rank));
  require_aligned(smem_addr(dst), 128, "a tensor copy");
  if (L->check) for_box(map, coords, smem_addr(dst), [&](uint32_t, char *g) { if (g) access(g, size_t(map.elem_bytes), READ); });
  AnyAlignment bytes_only;
  start_flights(x, bar, multicast);
}
template <class T, class F> static void add_with(char *g, const char *s, F sum) {
  T a, b;
  memcpy(&a, g, sizeof a);
  memcpy(&b, s, sizeof b);
  a = sum(a, b);
  memcpy(g, &a, sizeof a);
}
template <class T> static void add_to(char *g, const char *s) { add_with<T>(g, s, [](T a, T b) { return T(a + b); }); }
static __half add_half(__half a, __half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }
static __nv_bfloat16 add_bf16(__nv_bfloat16 a, __nv_bfloat16 b) { return __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b)); }
static void add_element(char *g, const char *s, int kind) {   // kind: CUtensorMapDataType
  switch (kind) {
    case 2: return add_to<uint32_t>(g, s);
    case 3: return add_to<int32_t>(g, s);
    case 4: return add_to<uint64_t>(g, s);
    case 5: return add_to<int64_t>(g, s);
    case 7: return add_to<float>(g, s);
    case 6: return add_with<__half>(g, s, add_half);
    case 9: return add_with<__nv_bfloat16>(g, s, add_bf16);
    default: fail("unsupported", "reducing bulk store of element type %d is not supported by the emulator", kind);
  }
}
static void land_store(const Copy &c) {
  mark_pending(cur->blk, c.src, size_t(c.bytes), 2, false);
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
  init_quiet = c.tensor;                                // what lies outside of the tensor may be undefined
  quiet_hit = false;
  access(c.src, size_t(c.bytes), READ);
  init_quiet = false;
  if (quiet_hit)
    for_box(c.map, c.coords, uint32_t(c.src - cur->blk->arena), [&](uint32_t s, char *g) {
      if (g) access(cur->blk->arena + s, size_t(c.map.elem_bytes), READ);
    });
  if (!L->async_late) return land_store(c);
  mark_pending(cur->blk, c.src, size_t(c.bytes), 2, true);
  cur->stores.push_back(c);
}
void bulk_store(void *dst, const void *src, uint32_t bytes, bool add) {
  Caller from(__builtin_return_address(0));
  Copy c{};
  c.dst = static_cast<char *>(dst); c.src = static_cast<const char *>(src); c.bytes = int(bytes); c.add = add; c.group = cur->store_groups;
  require_aligned(smem_addr(src), 16, "a bulk copy");
  start_store(c);
}
void tensor_store(const TensorMap &map, const void *src, const int32_t *coords, bool add) {
  Caller from(__builtin_return_address(0));
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
