// Asynchronous copies as the generated code names them: cp.async, mbarrier, bulk copies, tensor maps.
#pragma once
#include "tl.h"
using CUtensorMap = emu::TensorMap;

namespace tl {
template <int N> EMU_INLINE void cp_async_gs(const void *d, const void *s) { emu::cp_async(const_cast<void *>(d), s, N, N); }
template <int N> EMU_INLINE void cp_async_gs_conditional(const void *d, const void *s, bool c) { emu::cp_async(const_cast<void *>(d), s, N, c ? N : 0); }
inline void cp_async_commit() { emu::cp_commit(); }
template <int N> void cp_async_wait() { emu::cp_wait(N); }

inline void mbarrier_init(uint64_t &b, uint32_t n) { emu::mbar_init(&b, n); }
inline void mbarrier_arrive(uint64_t &b) { emu::mbar_arrive(&b, 0, true); }
inline void mbarrier_arrive(uint64_t &b, int rank, uint32_t on) { if (on) emu::mbar_arrive_remote(&b, rank, 0); }
inline void mbarrier_arrive_expect_tx(uint64_t &b, uint32_t n, int rank, uint32_t on) { if (on) emu::mbar_arrive_remote(&b, rank, n); }
inline void mbarrier_expect_tx(uint64_t &b, uint32_t n) { emu::mbar_arrive(&b, n, false); }
inline void mbarrier_arrive_expect_tx(uint64_t &b, uint32_t n) { emu::mbar_arrive(&b, n, true); }
inline uint32_t mbarrier_try_wait(uint64_t &b, int phase) {
  if (emu::mbar_test(&b, uint32_t(phase))) return 1;
  emu::yield();
  return emu::mbar_test(&b, uint32_t(phase));
}
inline void mbarrier_wait(uint64_t &b, int phase) { emu::mbar_wait(&b, uint32_t(phase)); }
inline void mbarrier_test_wait(uint64_t &b, int phase) { emu::mbar_wait(&b, uint32_t(phase)); }
inline bool mbarrier_test_wait(uint64_t &b, int phase, uint32_t on) { return on && mbarrier_try_wait(b, phase); }
inline void fence_proxy_async() { emu::proxy_fence(); }
inline void fence_barrier_init() {}
}  // namespace tl

struct alignas(8) Barrier {
  mutable uint64_t v;
  void init(uint32_t n) const { tl::mbarrier_init(v, n); }
  void wait(uint32_t p) const { tl::mbarrier_wait(v, int(p)); }
  bool try_wait(uint32_t p) const { return tl::mbarrier_try_wait(v, int(p)); }
  bool test_wait(uint32_t p, uint32_t on = 1) const { return tl::mbarrier_test_wait(v, int(p), on); }
  void arrive() const { tl::mbarrier_arrive(v); }
  void arrive(uint32_t rank, uint32_t on = 1) const { tl::mbarrier_arrive(v, int(rank), on); }
  void expect_transaction(uint32_t n) const { tl::mbarrier_expect_tx(v, n); }
  void arrive_and_expect_tx(uint32_t n) const { tl::mbarrier_arrive_expect_tx(v, n); }
};

namespace tl {
template <class B> void *barrier_address(B &b) {
  if constexpr (std::is_pointer_v<B>) return b;
  else return const_cast<std::remove_const_t<B> *>(&b);
}
template <class B> void mbarrier_cp_async_arrive(B &b) { emu::mbar_cp_async_arrive(barrier_address(b), false); }
template <class B> void mbarrier_cp_async_arrive_noinc(B &b) { emu::mbar_cp_async_arrive(barrier_address(b), true); }

enum class CacheHintSm90 : uint64_t { EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12F0000000000000, EVICT_LAST = 0x14F0000000000000 };
constexpr CacheHintSm90 kNormal = CacheHintSm90::EVICT_NORMAL;
template <CacheHintSm90 H = kNormal, class B> EMU_INLINE void tma_load(void *s, const void *g, B &b, uint32_t n) {
  emu::bulk_load(s, g, n, barrier_address(b));
}
template <class B> EMU_INLINE void tma_load_multicast(void *s, void *g, B &b, uint32_t n, uint16_t mask) {
  emu::bulk_load(s, g, n, barrier_address(b), mask);
}
template <CacheHintSm90 H = kNormal, class B, class... C>
EMU_INLINE void tma_load_multicast(const CUtensorMap &m, B &b, const void *s, uint16_t mask, C... coords) {
  int32_t c[] = {int32_t(coords)...};
  emu::tensor_load(m, const_cast<void *>(s), barrier_address(b), c, mask);
}
template <class B> EMU_INLINE void tma_store_cluster(void *d, void *s, int rank, uint32_t n, B &b) {
  emu::cluster_store(d, s, rank, n, barrier_address(b));
}
template <bool F = false> void cluster_arrive_relaxed() { emu::cluster_arrive(); }
template <bool F = false> void cluster_arrive() { emu::cluster_arrive(); }
template <bool F = false> void cluster_wait() { emu::cluster_wait(); }
template <bool F = false> void cluster_sync() { emu::cluster_arrive(); emu::cluster_wait(); }
template <bool F = false> int block_rank_in_cluster() { return emu::cluster_rank(); }
template <bool F = false> dim3 cluster_shape() { uint3 c = emu::cluster_shape(); return dim3(c.x, c.y, c.z); }
template <bool F = false> dim3 block_id_in_cluster() {
  uint3 c = emu::cluster_shape();
  return dim3(::blockIdx.x % c.x, ::blockIdx.y % c.y, ::blockIdx.z % c.z);
}
template <bool F = false> dim3 cluster_id_in_grid() {
  uint3 c = emu::cluster_shape();
  return dim3(::blockIdx.x / c.x, ::blockIdx.y / c.y, ::blockIdx.z / c.z);
}
template <bool F = false> dim3 cluster_grid_dims() {
  uint3 c = emu::cluster_shape();
  return dim3(gridDim.x / c.x, gridDim.y / c.y, gridDim.z / c.z);
}
EMU_INLINE void tma_store(void *g, void *s, uint32_t n) { emu::bulk_store(g, s, n, false); }
EMU_INLINE void tma_store_add(float *s, float *g, int n) { emu::bulk_store(g, s, uint32_t(n), true); }
template <CacheHintSm90 H = kNormal, class B, class... C> EMU_INLINE void tma_load(const CUtensorMap &m, B &b, const void *s, C... coords) {
  int32_t c[] = {int32_t(coords)...};
  emu::tensor_load(m, const_cast<void *>(s), barrier_address(b), c);
}
template <CacheHintSm90 H = kNormal, class B> EMU_RT void tma_load_im2col(const CUtensorMap &m, B &b, const void *s, int c, int w, int h, int n, int off_w, int off_h) {
  CUtensorMap shifted = m;
  shifted.offset[0] = off_w; shifted.offset[1] = off_h;
  int32_t coords[5] = {c, w, h, n, 0};
  emu::tensor_load(shifted, const_cast<void *>(s), barrier_address(b), coords);
}
template <CacheHintSm90 H = kNormal, class... C> EMU_INLINE void tma_store(const CUtensorMap &m, const void *s, C... coords) {
  int32_t c[] = {int32_t(coords)...};
  emu::tensor_store(m, s, c, false);
}
template <class... C> EMU_INLINE void tma_store_add(const CUtensorMap &m, const void *s, C... coords) {
  int32_t c[] = {int32_t(coords)...};
  emu::tensor_store(m, s, c, true);
}
inline void tma_store_arrive() { emu::store_commit(); }
template <int N, bool READ = true> void tma_store_wait() { emu::store_wait(N); }
inline void prefetch_tma_descriptor(const CUtensorMap &) {}
}  // namespace tl
