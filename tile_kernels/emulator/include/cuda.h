// CUDA's device intrinsics on top of the runtime: barriers, shuffles, votes, atomics, math, bits.
#pragma once
#include "core.h"
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short

// ---- barriers and fences -----------------------------------------------------------------------------------
#define EMU_LINE int line = __builtin_LINE()   // of the caller
inline void __syncthreads(EMU_LINE) { emu::bar_sync(0, 0, true, line); }
inline int __syncthreads_or(int p, EMU_LINE) { return emu::bar_reduce(emu::BAR_OR, p, line); }
inline int __syncthreads_and(int p, EMU_LINE) { return emu::bar_reduce(emu::BAR_AND, p, line); }
inline int __syncthreads_count(int p, EMU_LINE) { return emu::bar_reduce(emu::BAR_COUNT, p, line); }
EMU_RT inline void emu_meet(unsigned, void **) {}
inline void __syncwarp(unsigned mask = ~0u) { emu::collective(mask, emu_meet, nullptr); }
inline void __threadfence() { emu::fence(); }
inline void __threadfence_block() { emu::fence(true); }
inline void __threadfence_system() { emu::fence(); }
inline void __nanosleep(unsigned) { emu::yield(); }
inline unsigned __cvta_generic_to_shared(const void *p) { return emu::smem_addr(p); }
namespace cooperative_groups {
struct grid_group { void sync() const { emu::grid_sync(); } };
inline grid_group this_grid() { return {}; }
struct cluster_group {
  static void sync() { emu::cluster_arrive(); emu::cluster_wait(); }
  static void barrier_arrive() { emu::cluster_arrive(); }
  static void barrier_wait() { emu::cluster_wait(); }
  static unsigned block_rank() { return unsigned(emu::cluster_rank()); }
  static unsigned num_blocks() { uint3 c = emu::cluster_shape(); return c.x * c.y * c.z; }
  template <class T> static T *map_shared_rank(T *p, int rank) {
    return reinterpret_cast<T *>(emu::map_shared(reinterpret_cast<const void *>(p), rank));
  }
};
inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

// ---- shuffles --------------------------------------------------------------------------------------------------
namespace emu {
enum ShflMode { IDX, UP, DOWN, XOR };
struct ShflArg { uint64_t v, r; int sel, width; };
template <ShflMode MODE> EMU_RT void shfl_fn(unsigned lanes, void **args) {
  for (int l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    auto *a = static_cast<ShflArg *>(args[l]);
    int w = a->width, base = l & ~(w - 1), src = l, s = a->sel;
    if (MODE == IDX) src = base + (s & (w - 1));
    if (MODE == UP) src = l - s < base ? l : l - s;
    if (MODE == DOWN) src = l + s >= base + w ? l : l + s;
    if (MODE == XOR) { src = l ^ s; if (src >= base + w) src = l; }
    if (!(lanes >> src & 1)) return note_failure("divergence", "a shuffle in lane %d reads lane %d, which does not take part", l, src);
    a->r = static_cast<ShflArg *>(args[src])->v;
  }
}
template <ShflMode MODE, class T> EMU_RT T shfl(unsigned mask, T v, int sel, int width) {
  static_assert(sizeof(T) <= 8, "shuffle of at most 8 bytes");
  ShflArg a{0, 0, sel, width};
  memcpy(&a.v, &v, sizeof(T));
  collective(mask, shfl_fn<MODE>, &a);
  T r;
  memcpy(&r, &a.r, sizeof(T));
  return r;
}
// ---- votes, match, integer reductions --------------------------------------------------------------------------
struct VoteArg { uint64_t v, r; };
enum VoteOp { BALLOT, MATCH_ANY, MATCH_ALL, RED_ADD, RED_MIN, RED_MAX, RED_UMIN, RED_UMAX, RED_AND, RED_OR, RED_XOR };
template <VoteOp OP> EMU_RT uint64_t vote_step(unsigned acc, unsigned v) {
  if (OP == RED_ADD) return unsigned(acc + v);
  if (OP == RED_MIN) return int(v) < int(acc) ? v : acc;
  if (OP == RED_MAX) return int(v) > int(acc) ? v : acc;
  if (OP == RED_UMIN) return v < acc ? v : acc;
  if (OP == RED_UMAX) return v > acc ? v : acc;
  if (OP == RED_AND) return acc & v;
  if (OP == RED_OR) return acc | v;
  if (OP == RED_XOR) return acc ^ v;
  return acc;
}
template <VoteOp OP> EMU_RT void vote_fn(unsigned lanes, void **args) {
  auto value = [&](int l) EMU_RT { return static_cast<VoteArg *>(args[l])->v; };
  uint64_t acc = 0, first_value = 0;
  bool first = true, same = true;
  for (int l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    uint64_t v = value(l);
    if (OP == BALLOT) acc |= uint64_t(v != 0) << l;
    else if (first) acc = unsigned(v);
    else acc = vote_step<OP>(unsigned(acc), unsigned(v));
    if (first) first_value = v;
    same &= v == first_value;
    first = false;
  }
  for (int l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    uint64_t r = acc;
    if (OP == MATCH_ALL) r = same ? lanes : 0;
    if (OP == MATCH_ANY) { r = 0; for (int k = 0; k < 32; ++k) if ((lanes >> k & 1) && value(k) == value(l)) r |= 1u << k; }
    static_cast<VoteArg *>(args[l])->r = r;
  }
}
template <VoteOp OP, class T> EMU_RT uint64_t vote(unsigned mask, T v) {
  VoteArg a{0, 0};
  memcpy(&a.v, &v, sizeof(T));
  collective(mask, vote_fn<OP>, &a);
  return a.r;
}
}  // namespace emu
template <class T> EMU_RT T __shfl_sync(unsigned m, T v, int l, int w = 32) { return emu::shfl<emu::IDX>(m, v, l, w); }
template <class T> EMU_RT T __shfl_up_sync(unsigned m, T v, int d, int w = 32) { return emu::shfl<emu::UP>(m, v, d, w); }
template <class T> EMU_RT T __shfl_down_sync(unsigned m, T v, int d, int w = 32) { return emu::shfl<emu::DOWN>(m, v, d, w); }
template <class T> EMU_RT T __shfl_xor_sync(unsigned m, T v, int x, int w = 32) { return emu::shfl<emu::XOR>(m, v, x, w); }
inline unsigned __ballot_sync(unsigned m, int p) { return unsigned(emu::vote<emu::BALLOT>(m, p)); }
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, !p) == 0; }
inline unsigned __activemask() { return emu::live_lanes(); }   // right only in code the whole warp executes
template <class T> unsigned __match_any_sync(unsigned m, T v) { return unsigned(emu::vote<emu::MATCH_ANY>(m, v)); }
template <class T> unsigned __match_all_sync(unsigned m, T v, int *p) {
  unsigned r = unsigned(emu::vote<emu::MATCH_ALL>(m, v));
  *p = r != 0;
  return r;
}
inline int __reduce_add_sync(unsigned m, int v) { return int(emu::vote<emu::RED_ADD>(m, v)); }
inline unsigned __reduce_add_sync(unsigned m, unsigned v) { return unsigned(emu::vote<emu::RED_ADD>(m, v)); }
inline int __reduce_min_sync(unsigned m, int v) { return int(emu::vote<emu::RED_MIN>(m, v)); }
inline unsigned __reduce_min_sync(unsigned m, unsigned v) { return unsigned(emu::vote<emu::RED_UMIN>(m, v)); }
inline int __reduce_max_sync(unsigned m, int v) { return int(emu::vote<emu::RED_MAX>(m, v)); }
inline unsigned __reduce_max_sync(unsigned m, unsigned v) { return unsigned(emu::vote<emu::RED_UMAX>(m, v)); }
inline unsigned __reduce_and_sync(unsigned m, unsigned v) { return unsigned(emu::vote<emu::RED_AND>(m, v)); }
inline unsigned __reduce_or_sync(unsigned m, unsigned v) { return unsigned(emu::vote<emu::RED_OR>(m, v)); }
inline unsigned __reduce_xor_sync(unsigned m, unsigned v) { return unsigned(emu::vote<emu::RED_XOR>(m, v)); }

// ---- atomics: fibers switch only at synchronisation, so a read-modify-write is atomic by construction ------------
namespace emu {
template <class T, class F> EMU_RT inline T rmw(T *p, F f, int order = 0) {
  access(p, sizeof(T), ATOMIC);
  atomic_order(p, order);
  T old;
  memcpy(&old, p, sizeof(T));
  T next = f(old);
  memcpy(p, &next, sizeof(T));
  polled(memcmp(&old, &next, sizeof(T)) != 0);
  return old;
}
template <class T> struct same { using t = T; };   // keeps the second argument out of deduction
template <class T> using same_t = typename same<T>::t;
}  // namespace emu
template <class T> T atomicAdd(T *p, emu::same_t<T> v) { return emu::rmw(p, [=](T o) { return T(o + v); }); }
template <class T> T atomicSub(T *p, emu::same_t<T> v) { return emu::rmw(p, [=](T o) { return T(o - v); }); }
template <class T> T atomicMax(T *p, emu::same_t<T> v) { return emu::rmw(p, [=](T o) { return o < v ? v : o; }); }
template <class T> T atomicMin(T *p, emu::same_t<T> v) { return emu::rmw(p, [=](T o) { return v < o ? v : o; }); }
template <class T> T atomicAnd(T *p, emu::same_t<T> v) { return emu::rmw(p, [=](T o) { return T(o & v); }); }
template <class T> T atomicOr(T *p, emu::same_t<T> v) { return emu::rmw(p, [=](T o) { return T(o | v); }); }
template <class T> T atomicXor(T *p, emu::same_t<T> v) { return emu::rmw(p, [=](T o) { return T(o ^ v); }); }
template <class T> T atomicExch(T *p, emu::same_t<T> v) { return emu::rmw(p, [=](T) { return v; }); }
template <class T> T atomicCAS(T *p, emu::same_t<T> c, emu::same_t<T> v) {
  return emu::rmw(p, [=](T o) { return o == c ? v : o; });
}

// ---- scalar math -----------------------------------------------------------------------------------------------------
// max and min of floats as the hardware has them (PTX, without .NaN): a NaN is dropped, also a signalling one, for which
// std::fmax returns NaN; two NaNs make the canonical one; -0 is below +0.
namespace emu {
template <class A, class B> inline auto max_num(A x, B y) {
  std::common_type_t<A, B> a = x, b = y;
  if (a != a && b != b) a = __builtin_bit_cast(float, 0x7FFFFFFF);
  return b != b || b < a || (a == b && !std::signbit(a)) ? a : b;
}
template <class A, class B> inline auto min_num(A x, B y) {
  std::common_type_t<A, B> a = x, b = y;
  if (a != a && b != b) a = __builtin_bit_cast(float, 0x7FFFFFFF);
  return b != b || a < b || (a == b && std::signbit(a)) ? a : b;
}
}  // namespace emu
#define EMU_IF_ARITHMETIC class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>
template <class A, class B, EMU_IF_ARITHMETIC> inline auto max(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return emu::max_num(C(a), C(b));
  else return C(a) < C(b) ? C(b) : C(a);
}
template <class A, class B, EMU_IF_ARITHMETIC> inline auto min(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return emu::min_num(C(a), C(b));
  else return C(b) < C(a) ? C(b) : C(a);
}
using std::isfinite; using std::isinf; using std::isnan;
inline float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }   // hardware: approximate, 2 ulp
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float exp10f(float x) { return std::pow(10.f, x); }
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __tanhf(float x) { return std::tanh(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float fdividef(float x, float y) { return x / y; }
// A NaN that arithmetic returns is the canonical one on the GPU: 0x7FFFFFFF, whatever came in.
inline float emu_canonical(float r) { return r != r ? __builtin_bit_cast(float, 0x7FFFFFFF) : r; }
inline float __frcp_rn(float x) { return emu_canonical(1.f / x); }
inline float __frsqrt_rn(float x) { return float(1.0 / std::sqrt(double(x))); }
inline float __fsqrt_rn(float x) { return emu_canonical(std::sqrt(x)); }
inline float __fmaf_rn(float a, float b, float c) { return emu_canonical(std::fma(a, b, c)); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
// volatile keeps the compiler from contracting what these names promise to round separately
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return emu_canonical(r); }
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return emu_canonical(r); }
inline float __fsub_rn(float a, float b) { volatile float r = a - b; return emu_canonical(r); }
inline float __fdiv_rn(float a, float b) { return emu_canonical(a / b); }
inline double __dmul_rn(double a, double b) { volatile double r = a * b; return r; }
inline double __dadd_rn(double a, double b) { volatile double r = a + b; return r; }
inline double __dsub_rn(double a, double b) { volatile double r = a - b; return r; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.f) : 0.f; }
template <class T> T __ldg(const T *p) { return *p; }

// ---- bits --------------------------------------------------------------------------------------------------------------
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
// Position of the n-th set bit from `base` on (n > 0 upwards, n < 0 downwards; n = 0: `base` itself if set); ~0 if there is none.
inline unsigned __fns(unsigned mask, unsigned base, int n) {
  if (n == 0) return mask >> base & 1 ? base : ~0u;
  int step = n > 0 ? 1 : -1;
  for (int i = int(base), left = std::abs(n); i >= 0 && i < 32; i += step)
    if (mask >> i & 1 && --left == 0) return unsigned(i);
  return ~0u;
}
inline unsigned long long __brevll(unsigned long long x) {
  unsigned long long r = 0;
  for (int i = 0; i < 64; ++i) r |= (x >> i & 1) << (63 - i);
  return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) { return unsigned(((uint64_t(hi) << 32 | lo) << (s & 31)) >> 32); }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) { return unsigned((uint64_t(hi) << 32 | lo) >> (s & 31)); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= unsigned(bytes >> 8 * (s >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline int __mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
namespace emu {
template <class To, class From> inline To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  memcpy(&r, &x, sizeof r);
  return r;
}
}  // namespace emu
inline unsigned __float_as_uint(float x) { return emu::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return emu::bit_cast<float>(x); }
inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return emu::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return emu::bit_cast<double>(x); }
// Conversions to integers saturate; NaN is 0, or the top bit alone where one side has 64 bits (PTX: cvt). `x` is integral.
namespace emu {
template <class I, class F> EMU_RT inline I to_int(F x) {
  using L = std::numeric_limits<I>;
  if (x != x) return sizeof(I) == 8 || sizeof(F) == 8 ? I(I(1) << (8 * sizeof(I) - 1)) : I(0);
  F end = std::ldexp(F(1), L::digits);      // the first value that is too large, exactly
  return x >= end ? L::max() : x < F(L::min()) ? L::min() : I(x);
}
}  // namespace emu
#define EMU_TO_INT(F, FN, I, IN)                                                                      \
  inline I __##FN##2##IN##_rn(F x) { return emu::to_int<I>(std::nearbyint(x)); }                      \
  inline I __##FN##2##IN##_rz(F x) { return emu::to_int<I>(std::trunc(x)); }                          \
  inline I __##FN##2##IN##_ru(F x) { return emu::to_int<I>(std::ceil(x)); }                           \
  inline I __##FN##2##IN##_rd(F x) { return emu::to_int<I>(std::floor(x)); }
EMU_TO_INT(float, float, int, int) EMU_TO_INT(float, float, unsigned, uint)
EMU_TO_INT(float, float, long long, ll) EMU_TO_INT(float, float, unsigned long long, ull)
EMU_TO_INT(double, double, int, int) EMU_TO_INT(double, double, unsigned, uint)
EMU_TO_INT(double, double, long long, ll) EMU_TO_INT(double, double, unsigned long long, ull)
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
  return c;
}
inline long long clock64() { static long long t = 0; return ++t; }
[[noreturn]] inline void __trap() { emu::fail("assert", "the kernel executed __trap()"); }
