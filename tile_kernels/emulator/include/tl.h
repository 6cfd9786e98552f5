// Stand-ins for TileLang's device templates (tilelang 0.1.15), written from their documented meaning.
#pragma once
#include "types.h"

// ---- asserts and printing ----------------------------------------------------------------------------------------
inline void device_assert_with_msg(bool c, const char *m) { if (!c) emu::fail("assert", "device assert failed: %s", m); }
inline void device_assert(bool c) { device_assert_with_msg(c, ""); }
inline void emu_print_place(const char *m) {
  printf("msg='%s' BlockIdx=(%u, %u, %u), ThreadIdx=(%u, %u, %u)", m, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
}
inline void debug_print_msg(const char *m) { emu_print_place(m); printf("\n"); }
template <class T> void debug_print_var(const char *m, T v) { emu_print_place(m); printf(": value=%g\n", double(v)); }
template <class T> void debug_print_buffer_value(const char *m, const char *b, int i, T v) {
  emu_print_place(m);
  printf(": buffer=%s, index=%d, value=%g\n", b, i, double(float(v)));
}

// ---- atomics: the last argument is the C++ memory order --------------------------------------------------------------
#define EMU_ATOMIC(N, EXPR)                                                                                                     \
  template <class T, class V> T N##Ret(T *p, V x, int order = 0) { T v = T(x); return emu::rmw(p, [=](T o) { return T(EXPR); }, order); } \
  template <class T, class V> void N(T *p, V x, int order = 0) { N##Ret(p, x, order); }
EMU_ATOMIC(AtomicAdd, o + v) EMU_ATOMIC(AtomicMax, o < v ? v : o) EMU_ATOMIC(AtomicMin, v < o ? v : o)
EMU_ATOMIC(AtomicAnd, o & v) EMU_ATOMIC(AtomicXor, o ^ v)
template <class T, class V> void AtomicOr(T *p, V x, int order = 0) {   // red.global in TileLang's templates
  emu::global_only(p, sizeof(T), "AtomicOr");
  T v = T(x);
  emu::rmw(p, [=](T o) { return T(o | v); }, order);
}
template <class T, class V> void AtomicStore(T *p, V x, int order = 0) { T v = T(x); emu::rmw(p, [=](T) { return v; }, order); }
template <class T> EMU_RT std::remove_const_t<T> AtomicLoad(T *p, int order = 0) {
  emu::yield();                                        // lets the thread this one may be waiting for go on
  emu::access(p, sizeof(T), emu::ATOMIC_READ);
  emu::atomic_order(p, order);
  std::remove_const_t<T> r;
  memcpy(&r, p, sizeof(T));
  return r;
}
// Vector forms add element by element; the source is a pointer or a CUDA vector, converted when it is float.
namespace emu {
template <class V, size_t N, class T, class S> inline V atomic_addn(T *p, const S *v, int order) {
  static_assert(sizeof(V) == sizeof(T) * N);
  T old[N];
  for (size_t i = 0; i < N; ++i) old[i] = AtomicAddRet(p + i, T(float(v[i])), order);
  V r;
  memcpy(&r, old, sizeof r);
  return r;
}
template <class T> struct pair { using t = float2; };
template <> struct pair<half_t> { using t = __half2; };
template <> struct pair<bfloat16_t> { using t = __nv_bfloat162; };
template <class T> using pair_of = typename pair<T>::t;
template <class T> using quad_of = std::conditional_t<sizeof(T) == 2, uint2, float4>;
}  // namespace emu
template <class T, class S> emu::pair_of<T> AtomicAddx2Ret(T *p, S *v, int order = 0) {
  return emu::atomic_addn<emu::pair_of<T>, 2>(p, v, order);
}
template <class T, class S> emu::quad_of<T> AtomicAddx4Ret(T *p, S *v, int order = 0) {
  return emu::atomic_addn<emu::quad_of<T>, 4>(p, v, order);
}
template <class T> emu::pair_of<T> AtomicAddx2Ret(T *p, float2 v, int order = 0) { return AtomicAddx2Ret(p, &v.x, order); }
template <class T> emu::quad_of<T> AtomicAddx4Ret(T *p, float4 v, int order = 0) { return AtomicAddx4Ret(p, &v.x, order); }
// 16-bit pairs also arrive packed: a bf16x2, a half2 or the word that stores one.
template <class T, class V, class = std::enable_if_t<sizeof(T) == 2 && sizeof(V) == 4 && !std::is_pointer_v<V>>>
emu::pair_of<T> AtomicAddx2Ret(T *p, V v, int order = 0) { return AtomicAddx2Ret(p, reinterpret_cast<T *>(&v), order); }
template <class T, class V> void AtomicAddx2(T *p, V v, int order = 0) { AtomicAddx2Ret(p, v, order); }
template <class T, class V> void AtomicAddx4(T *p, V v, int order = 0) { AtomicAddx4Ret(p, v, order); }
inline unsigned smem_ptr_to_uint(const void *p) { return emu::smem_addr(p); }
inline unsigned cast_smem_ptr_to_int(const void *p) { return emu::smem_addr(p); }
template <class I, class O> void DP4A(I *a, I *b, O *c) {
  *c = __dp4a(*reinterpret_cast<int *>(a), *reinterpret_cast<int *>(b), *reinterpret_cast<int *>(c));
}

// ---- inline PTX (ptx.py): bits of one type as another, and the instructions that C++ has no operator for -------------------
namespace emu {
template <class T, class V> inline T ptx_as(V v) {
  if constexpr (std::is_same_v<T, V>) return v;
  else if constexpr (std::is_pointer_v<V>) return T(reinterpret_cast<uintptr_t>(v));
  else if constexpr (std::is_integral_v<T> && (std::is_integral_v<V> || std::is_enum_v<V>)) return T(v);
  else if constexpr (sizeof(T) == sizeof(V)) return bit_cast<T>(v);
  else return T(v);
}
template <class D, class V> inline void ptx_set(D &d, V v) {
  if constexpr (std::is_pointer_v<D>) d = reinterpret_cast<D>(uintptr_t(v));
  else d = ptx_as<D>(v);
}
template <class T, class... P> inline T ptx_pack(P... p) {
  T r = 0;
  unsigned at = 0;
  ((r |= T(bit_cast<std::conditional_t<sizeof(P) == 2, uint16_t, std::conditional_t<sizeof(P) == 4, uint32_t, uint8_t>>>(p)) << at, at += 8 * sizeof(P)), ...);
  return r;
}
inline uint32_t ptx_lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t r = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
inline uint32_t ptx_prmt(uint32_t a, uint32_t b, uint32_t s) {   // bit 3 of a selector repeats the sign of its byte
  uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t pick = s >> 4 * i & 15, byte = uint32_t(bytes >> 8 * (pick & 7)) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    r |= byte << 8 * i;
  }
  return r;
}
inline uint32_t ptx_tf32(float x) {   // round to nearest, ties away from zero
  uint32_t u = bit_cast<uint32_t>(x);
  return (u & 0x7f800000) == 0x7f800000 ? u : (u + 0x1000) & 0xffffe000u;
}
template <class T> inline T ptx_bfe(T a, uint32_t at, uint32_t count) {
  using U = std::make_unsigned_t<T>;
  constexpr uint32_t bits = 8 * sizeof(T);
  at &= 255; count &= 255;
  if (!count) return 0;
  bool sign = std::is_signed_v<T> && (U(a) >> (at + count < bits ? at + count - 1 : bits - 1) & 1);
  U v = at < bits ? U(U(a) >> at) : U(0);
  if (count < bits) v &= (U(1) << count) - 1;
  uint32_t have = (count < bits ? count : bits);
  return T(sign && have < bits ? v | ~((U(1) << have) - 1) : v);
}
template <class T, class V> inline T ptx_saturate(V v) {
  using L = std::numeric_limits<T>;
  __int128 x = v;
  return x > L::max() ? L::max() : x < L::min() ? L::min() : T(v);
}
}  // namespace emu

// ---- cuRAND's Philox 4x32-10: the sequence of curand_init, and the conversions of curand_uniform and curand_normal ----------
struct curandStatePhilox4_32_10_t { uint32_t ctr[4], key[2], out[4]; int used, has_extra; float extra; };
using curandStatePhilox4_32_10 = curandStatePhilox4_32_10_t;
namespace emu {
using Philox = curandStatePhilox4_32_10_t;
inline void philox_rounds(Philox *s) {
  uint32_t c[4], k0 = s->key[0], k1 = s->key[1];
  memcpy(c, s->ctr, sizeof c);
  for (int i = 0; i < 10; ++i, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    uint32_t n[4] = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k1, uint32_t(a)};
    memcpy(c, n, sizeof c);
  }
  memcpy(s->out, c, sizeof c);
}
inline void philox_skip(Philox *s, uint64_t n, int word) {   // adds n to the counter from `word` on
  for (int i = word; i < 4 && n; i += 2) {
    uint64_t old = uint64_t(s->ctr[i + 1]) << 32 | s->ctr[i], sum = old + n;
    s->ctr[i] = uint32_t(sum); s->ctr[i + 1] = uint32_t(sum >> 32);
    n = sum < old;
  }
}
}  // namespace emu
inline void curand_init(unsigned long long seed, unsigned long long subsequence, unsigned long long offset, emu::Philox *s) {
  *s = {};
  s->key[0] = uint32_t(seed); s->key[1] = uint32_t(seed >> 32);
  emu::philox_skip(s, subsequence, 2);
  emu::philox_skip(s, offset / 4, 0);
  s->used = int(offset % 4);
  emu::philox_rounds(s);
}
inline unsigned curand(emu::Philox *s) {
  unsigned r = s->out[s->used];
  if (++s->used == 4) { emu::philox_skip(s, 1, 0); emu::philox_rounds(s); s->used = 0; }
  return r;
}
inline uint4 curand4(emu::Philox *s) { unsigned a = curand(s), b = curand(s), c = curand(s), d = curand(s); return make_uint4(a, b, c, d); }
namespace emu {
inline float philox_uniform(unsigned x) { return x * 2.3283064e-10f + 2.3283064e-10f / 2; }
inline float2 philox_normal(unsigned x, unsigned y) {   // Box-Muller
  float u = philox_uniform(x), v = y * (2.3283064e-10f * 6.2831855f) + 2.3283064e-10f * 6.2831855f / 2;
  float r = std::sqrt(-2.f * std::log(u));
  return make_float2(r * std::sin(v), r * std::cos(v));
}
}  // namespace emu
inline float curand_uniform(emu::Philox *s) { return emu::philox_uniform(curand(s)); }
inline float4 curand_uniform4(emu::Philox *s) {
  uint4 x = curand4(s);
  return make_float4(emu::philox_uniform(x.x), emu::philox_uniform(x.y), emu::philox_uniform(x.z), emu::philox_uniform(x.w));
}
inline float2 curand_normal2(emu::Philox *s) { unsigned x = curand(s), y = curand(s); return emu::philox_normal(x, y); }
inline float4 curand_normal4(emu::Philox *s) {
  uint4 x = curand4(s);
  float2 a = emu::philox_normal(x.x, x.y), b = emu::philox_normal(x.z, x.w);
  return make_float4(a.x, a.y, b.x, b.y);
}
inline float curand_normal(emu::Philox *s) {
  if (s->has_extra) { s->has_extra = 0; return s->extra; }
  float2 v = curand_normal2(s);
  s->extra = v.y; s->has_extra = 1;
  return v.x;
}

namespace tl {
enum class DataType : int {
  kInt4, kUInt4, kInt8, kUInt8, kInt16, kUInt16, kInt32, kUInt32, kInt64, kUInt64, kFloat8_e4m3, kFloat8_e5m2, kFloat16, kBFloat16,
  kFloat16x2, kFloat32, kTensorFloat32, kFloat64, kBit1, kBit8, kBit16, kBit32, kBit64, kFloat6_e2m3fn, kFloat6_e3m2fn, kFloat4_e2m1fn
};

// ---- small vectors -------------------------------------------------------------------------------------------------------
template <class V, class U> V broadcast(U u) {
  V r;
  for (size_t i = 0; i < sizeof(V) / sizeof(U); ++i) memcpy(reinterpret_cast<char *>(&r) + i * sizeof(U), &u, sizeof(U));
  return r;
}
template <class V, class E, class... R> V make_vec(E e, R... r) { return emu::pack<V>(e, r...); }
template <class T> T from_uint1(uint1 v) { return emu::bit_cast<T>(v); }
template <class T> uint1 to_uint1(T v) { return emu::bit_cast<uint1>(v); }
inline uint1 pack_half2(half_t a, half_t b) { return emu::pack<uint1>(a, b); }
inline uint1 pack_bfloat162(bfloat16_t a, bfloat16_t b) { return emu::pack<uint1>(a, b); }
template <class T> bool Any(T *a, int n) { for (int i = 0; i < n; ++i) if (a[i]) return true; return false; }
template <class T> bool All(T *a, int n) { for (int i = 0; i < n; ++i) if (!a[i]) return false; return true; }
template <uint64_t BYTES, uint64_t VALUE> EMU_RT void st_bulk_shared(void *p) {
  static_assert(VALUE == 0, "st.bulk stores zeros only");
  emu::access(p, BYTES, emu::WRITE);
  memset(p, 0, BYTES);
}

// ---- math ------------------------------------------------------------------------------------------------------------------
inline float fast_rcp(float x) { return 1.f / x; }
template <class T> T fast_max(T a, T b) { if constexpr (std::is_same_v<T, float>) return emu::max_num(a, b); else return a < b ? b : a; }
template <class T> T fast_min(T a, T b) { if constexpr (std::is_same_v<T, float>) return emu::min_num(a, b); else return b < a ? b : a; }
template <int Y = 1, class T> T pow_of_int(T x) { T r = x; for (int i = 1; i < Y; ++i) r *= x; return r; }
template <class T> T max(T a, T b) { return T(emu::max_num(float(a), float(b))); }
template <class T> T min(T a, T b) { return T(emu::min_num(float(a), float(b))); }
// NaN in either operand wins
inline float max_nan(float a, float b) { return a != a ? a : b != b ? b : emu::max_num(a, b); }
inline float min_nan(float a, float b) { return a != a ? a : b != b ? b : emu::min_num(a, b); }
template <class T> T clamp(T x, T lo, T hi) {
  if constexpr (std::is_same_v<T, double>) return x != x ? x : lo != lo ? lo : hi != hi ? hi : emu::min_num(emu::max_num(x, lo), hi);
  else return T(min_nan(max_nan(float(x), float(lo)), float(hi)));
}
template <class T> T RoundTiesAwayFromZero(T x) { return T(std::round(std::conditional_t<std::is_same_v<T, double>, double, float>(x))); }
#define EMU_X2(N, EX, EY)                                                                                                                        \
  inline float2 N(float2 a, float2 b) { return make_float2(EX, EY); }                                                                            \
  inline __nv_bfloat162 N(__nv_bfloat162 p, __nv_bfloat162 q) { return __float22bfloat162_rn(N(__bfloat1622float2(p), __bfloat1622float2(q))); } \
  inline __half2 N(__half2 p, __half2 q) { return __float22half2_rn(N(__half22float2(p), __half22float2(q))); }
EMU_X2(add2, a.x + b.x, a.y + b.y) EMU_X2(sub2, a.x - b.x, a.y - b.y) EMU_X2(mul2, a.x * b.x, a.y * b.y)
EMU_X2(max2, emu::max_num(a.x, b.x), emu::max_num(a.y, b.y)) EMU_X2(min2, emu::min_num(a.x, b.x), emu::min_num(a.y, b.y))
EMU_X2(max2_nan, max_nan(a.x, b.x), max_nan(a.y, b.y)) EMU_X2(min2_nan, min_nan(a.x, b.x), min_nan(a.y, b.y))
template <class T> T clamp2(T x, T lo, T hi) { return min2_nan(max2_nan(x, lo), hi); }
inline float2 abs2(float2 a) { return make_float2(std::fabs(a.x), std::fabs(a.y)); }
inline __nv_bfloat162 abs2(__nv_bfloat162 a) { return __float22bfloat162_rn(abs2(__bfloat1622float2(a))); }
inline __half2 abs2(__half2 a) { return __float22half2_rn(abs2(__half22float2(a))); }
inline float2 fma2(float2 a, float2 b, float2 c) { return make_float2(std::fma(a.x, b.x, c.x), std::fma(a.y, b.y, c.y)); }
inline __half2 fma2(__half2 a, __half2 b, __half2 c) {
  return __halves2half2(__hfma(half_t(a.x), half_t(b.x), half_t(c.x)).to_half(), __hfma(half_t(a.y), half_t(b.y), half_t(c.y)).to_half());
}
inline __nv_bfloat162 fma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __halves2bfloat162(__hfma(bfloat16_t(a.x), bfloat16_t(b.x), bfloat16_t(c.x)).to_nv_bfloat16(),
                            __hfma(bfloat16_t(a.y), bfloat16_t(b.y), bfloat16_t(c.y)).to_nv_bfloat16());
}

// ---- who am I ------------------------------------------------------------------------------------------------------------
EMU_RT inline int get_lane_idx(int w = 32) { return emu::self->lin % (w > 0 ? w : 32); }
EMU_RT inline int get_warp_idx(int w = 32) { return emu::self->lin / (w > 0 ? w : 32); }
EMU_RT inline int get_warp_idx_sync(int w = 32) { return get_warp_idx(w); }
EMU_RT inline int get_warp_group_idx(int w = 32, int g = 4) { return emu::self->lin / ((w > 0 ? w : 32) * (g > 0 ? g : 4)); }
// One lane per `EXTENT` threads (0: one of the block). The hardware elects among converged lanes; always lane 0 here.
template <int EXTENT> EMU_RT bool tl_shuffle_elect() {
  if (emu::self->lane != 0) return false;
  if constexpr (EXTENT == 0) return emu::self->warp == 0; else return emu::self->warp % ((EXTENT + 31) / 32) == 0;
}

// ---- reductions and scans: the device's pairing order, so that float sums agree bit for bit ---------------------------------
template <class T> T shfl_xor_sync(unsigned m, T v, int x) { return __shfl_xor_sync(m, v, x); }
template <class T> T shfl_down_sync(unsigned m, T v, int d) { return __shfl_down_sync(m, v, d); }
template <class T> T shfl_up_sync(unsigned m, T v, int d) { return __shfl_up_sync(m, v, d); }
template <class T> T shfl_sync(unsigned m, T v, int l) { return __shfl_sync(m, v, l); }
#define EMU_OP(N, EXPR) struct N { template <class T> T operator()(const T &x, const T &y) const { return EXPR; } };
template <class T> constexpr bool is_16bit = std::is_same_v<T, half_t> || std::is_same_v<T, bfloat16_t>;
template <class T> T op_max(T x, T y) { if constexpr (is_16bit<T>) return T(emu::max_num(float(x), float(y))); else return fast_max(x, y); }
template <class T> T op_min(T x, T y) { if constexpr (is_16bit<T>) return T(emu::min_num(float(x), float(y))); else return fast_min(x, y); }
template <class T> T op_max_nan(T x, T y) { if constexpr (is_16bit<T>) return T(max_nan(x, y)); else return fast_max(x, y); }
template <class T> T op_min_nan(T x, T y) { if constexpr (is_16bit<T>) return T(min_nan(x, y)); else return fast_min(x, y); }
EMU_OP(SumOp, T(x + y)) EMU_OP(MaxOp, op_max(x, y)) EMU_OP(MinOp, op_min(x, y))
EMU_OP(MaxOpNan, op_max_nan(x, y)) EMU_OP(MinOpNan, op_min_nan(x, y))
EMU_OP(BitAndOp, T(x & y)) EMU_OP(BitOrOp, T(x | y)) EMU_OP(BitXorOp, T(x ^ y))
EMU_OP(SumOp_f32x2, add2(x, y)) EMU_OP(MaxOp_f32x2, max2(x, y)) EMU_OP(MinOp_f32x2, min2(x, y))
#define EMU_OP_X2(S, V)                                                                                              \
  EMU_OP(SumOp_##S, to_uint1(add2(from_uint1<V>(x), from_uint1<V>(y)))) EMU_OP(MaxOp_##S, to_uint1(max2(from_uint1<V>(x), from_uint1<V>(y)))) \
  EMU_OP(MinOp_##S, to_uint1(min2(from_uint1<V>(x), from_uint1<V>(y)))) EMU_OP(MaxOpNan_##S, to_uint1(max2_nan(from_uint1<V>(x), from_uint1<V>(y)))) \
  EMU_OP(MinOpNan_##S, to_uint1(min2_nan(from_uint1<V>(x), from_uint1<V>(y))))
EMU_OP_X2(bf16x2, __nv_bfloat162) EMU_OP_X2(fp16x2, __half2)

struct SyncThreadsBarrier { template <int P = 0> static void sync() { __syncthreads(); } };
template <int N> struct NamedBarrier { template <int P = 1> static void sync(EMU_LINE) { emu::bar_sync(P, N, true, line); } };
inline void __sync_thread_partial(int id = 0, int n = 0, EMU_LINE) { emu::bar_sync(id, n, true, line); }
inline void __named_barrier_arrive(int id, int n, EMU_LINE) { emu::bar_sync(id, n, false, line); }

// Butterfly over `threads` threads at stride `scale`: through shared memory beyond a warp, shuffles inside.
template <class Op, int threads, int scale, int base = 0, class Barrier = SyncThreadsBarrier, int batch = 1, int stride = 0> struct AllReduce {
  static_assert(threads % scale == 0 && ((threads / scale) & (threads / scale - 1)) == 0, "the reduced width must be a power of two");
  template <class T> static T run(T x, T *buf = nullptr) { run_n<1>(&x, buf); return x; }
  template <class T> static void run_batch(T *x, T *buf = nullptr) { run_n<batch>(x, buf); }

private:
  template <int B, class T> static void run_n(T *x, T *buf) {
    int t = int(threadIdx.x) - base;
    for (int off = threads / 2; off >= scale; off /= 2) {
      if (off >= 32) {
        Barrier::template sync<1>();
        for (int i = 0; i < B; ++i) buf[t + i * stride] = x[i];
        Barrier::template sync<2>();
        for (int i = 0; i < B; ++i) x[i] = Op()(x[i], buf[(t ^ off) + i * stride]);
      } else {
        for (int i = 0; i < B; ++i) x[i] = Op()(x[i], __shfl_xor_sync(~0u, x[i], off));
      }
    }
  }
};
template <class Op, class T> T warp_fold(T v) { for (int o = 16; o; o /= 2) v = Op()(v, __shfl_xor_sync(~0u, v, o)); return v; }
template <class T> T warp_reduce_sum(T v) { return warp_fold<SumOp>(v); }
template <class T> T warp_reduce_max(T v) { return warp_fold<MaxOp>(v); }
template <class T> T warp_reduce_min(T v) { return warp_fold<MinOp>(v); }
template <class T> T warp_reduce_bitand(T v) { return warp_fold<BitAndOp>(v); }
template <class T> T warp_reduce_bitor(T v) { return warp_fold<BitOrOp>(v); }

// Inclusive scan of one line by one warp, in segments of SEG with a carry.
template <class Op, bool REVERSE, int SEG, class T> void scan_line(const T *s, T *d, int n, int ss, int ds, T identity) {
  int lane = int(threadIdx.x) % SEG, segments = (n + SEG - 1) / SEG;
  T carry = identity;
  for (int q = 0; q < segments; ++q) {
    int i = (REVERSE ? segments - 1 - q : q) * SEG + lane;
    T v = i < n ? s[i * ss] : identity;
    for (int o = 1; o < SEG; o *= 2) {
      T u = REVERSE ? __shfl_down_sync(~0u, v, o) : __shfl_up_sync(~0u, v, o);
      if (REVERSE ? lane < SEG - o : lane >= o) v = Op()(v, u);
    }
    v = Op()(v, carry);
    if (i < n) d[i * ds] = v;
    carry = __shfl_sync(~0u, v, REVERSE ? 0 : SEG - 1);
  }
}
template <class T> T lowest() {
  if constexpr (std::is_integral_v<T>) return std::numeric_limits<T>::lowest(); else return T(-std::numeric_limits<float>::infinity());
}
#define EMU_SCAN(NAME, OP, IDENTITY)                                                                                          \
  template <int threads, bool rev = false> struct NAME##1D {                                                                  \
    template <class T, int SEG = 32> static void run(const T *s, T *d, int n) {                                               \
      if (int(threadIdx.x) < SEG) scan_line<OP, rev, SEG>(s, d, n, 1, 1, T(IDENTITY));                                        \
    }                                                                                                                         \
  };                                                                                                                          \
  template <int threads, int Axis = 0, bool rev = false> struct NAME##2D {                                                    \
    template <class T, int SEG = 32> static void run(const T *s, T *d, int H, int W, int ss, int ds) {                        \
      for (int r = int(threadIdx.x) / SEG; r < (Axis ? H : W); r += threads / SEG)                                            \
        if (Axis) scan_line<OP, rev, SEG>(s + r * ss, d + r * ds, W, 1, 1, T(IDENTITY));                                      \
        else scan_line<OP, rev, SEG>(s + r, d + r, H, ss, ds, T(IDENTITY));                                                   \
    }                                                                                                                         \
    template <class T> static void run(const T *s, T *d, int H, int W) { run(s, d, H, W, W, W); }   /* until 0.1.12 */         \
  };
EMU_SCAN(CumSum, SumOp, 0)
EMU_SCAN(CumMax, MaxOp, lowest<T>())

// ---- explicit accesses -------------------------------------------------------------------------------------------------------
template <class T> T load_vector(const void *p) {
  emu::require_aligned(p, sizeof(T), emu::READ);
  return *static_cast<const T *>(p);
}
template <class T> void store_vector(void *p, const T &v) {
  emu::require_aligned(p, sizeof(T), emu::WRITE);
  *static_cast<T *>(p) = v;
}
#define EMU_LDST(B, T)                                                                                       \
  inline T load_global_##B(const void *p) { return load_vector<T>(p); }                                      \
  inline T load_global_##B##_conditional(const void *p, bool c) { return c ? load_vector<T>(p) : T{}; }      \
  inline T load_shared_##B(const void *p) { return load_vector<T>(p); }                                      \
  inline void store_shared_##B(void *p, T v) { store_vector<T>(p, v); }                                      \
  inline void store_global_##B(void *p, T v) { store_vector<T>(p, v); }                                      \
  inline void store_global_##B##_conditional(void *p, T v, bool c) { if (c) store_vector<T>(p, v); }
EMU_LDST(32, uint32_t) EMU_LDST(64, uint2) EMU_LDST(128, uint4)
// sm_100 and later: 32 bytes, typed by the pointer
template <class T> using wide_t = std::conditional_t<std::is_void_v<T>, ulonglong4, T>;
template <class T> wide_t<T> load_global_256(const T *p) { return load_vector<wide_t<T>>(p); }
template <class T> wide_t<T> load_global_256_conditional(const T *p, bool c) { return c ? load_global_256(p) : wide_t<T>{}; }
template <class T> void store_global_256(void *p, const T &v) { static_assert(sizeof(T) == 32); store_vector<T>(p, v); }
template <class T> void store_global_256_conditional(void *p, const T &v, bool c) { if (c) store_global_256(p, v); }
template <class T> unsigned long long pack_bfloat16x4(T a, T b, T c, T d) { return emu::pack<unsigned long long>(a, b, c, d); }
template <class T> unsigned long long pack_float16x4(T a, T b, T c, T d) { return emu::pack<unsigned long long>(a, b, c, d); }

// ---- block swizzle: panels of W rows (columns), alternating direction ----------------------------------------------------------
inline void panel_walk(unsigned w, unsigned along, unsigned across, unsigned id, unsigned &a, unsigned &b) {
  unsigned all = along * across, size = w * along, off = id % size, p = id / size;
  unsigned width = p + 1 < (all + size - 1) / size ? w : (all - p * size) / along;
  a = p & 1 ? along - 1 - off / width : off / width;
  b = off % width + p * w;
}
template <int W> dim3 rasterization2DRow() {
  unsigned x, y;
  panel_walk(W, gridDim.x, gridDim.y, ::blockIdx.x + ::blockIdx.y * gridDim.x, x, y);
  return dim3(x, y, ::blockIdx.z);
}
template <int W> dim3 rasterization2DColumn() {
  unsigned x, y;
  panel_walk(W, gridDim.y, gridDim.x, ::blockIdx.x + ::blockIdx.y * gridDim.x, y, x);
  return dim3(x, y, ::blockIdx.z);
}
// The walk over whole clusters, which are C blocks wide.
template <int W, int C> dim3 rasterization2DRowWithCluster() {
  unsigned x, y, n = gridDim.x / C;
  panel_walk(W, n, gridDim.y, ::blockIdx.x / C + ::blockIdx.y * n, x, y);
  return dim3(x * C + ::blockIdx.x % C, y, ::blockIdx.z);
}
template <int W, int C> dim3 rasterization2DColumnWithCluster() {
  unsigned x, y, n = gridDim.x / C;
  panel_walk(W, gridDim.y, n, ::blockIdx.x / C + ::blockIdx.y * n, y, x);
  return dim3(x * C + ::blockIdx.x % C, y, ::blockIdx.z);
}
}  // namespace tl
template <class T> unsigned pack_b8x4(T a, T b, T c, T d) { return emu::pack<unsigned>(a, b, c, d); }
