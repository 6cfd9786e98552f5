// The scalar and vector types of TileLang's generated code: bf16, fp16, fp8, fp4; packing; conversions.
// Conversions are NVIDIA's own software versions from the CUDA headers, so rounding and saturation are theirs.
#pragma once
#include "cuda.h"
namespace emu {   // NVIDIA's names for the bits of small floats
using fp8_kind = __nv_fp8_interpretation_t;
using f8 = __nv_fp8_storage_t;
using f8x2 = __nv_fp8x2_storage_t;
using f8x4 = __nv_fp8x4_storage_t;
using f4 = __nv_fp4_storage_t;
using f4x2 = __nv_fp4x2_storage_t;
using f4x4 = __nv_fp4x4_storage_t;
}  // namespace emu

// Storage plus float arithmetic, one rounding per operation.
#define EMU_OPS(T)                                                                                             \
  friend T operator+(T a, T b) { return T(float(a) + float(b)); }                                              \
  friend T operator-(T a, T b) { return T(float(a) - float(b)); }                                              \
  friend T operator*(T a, T b) { return T(float(a) * float(b)); }                                              \
  friend T operator/(T a, T b) { return T(float(a) / float(b)); }                                              \
  T operator-() const { return T(-float(*this)); }                                                             \
  T &operator+=(T b) { return *this = *this + b; }                                                             \
  T &operator-=(T b) { return *this = *this - b; }                                                             \
  T &operator*=(T b) { return *this = *this * b; }                                                             \
  T &operator/=(T b) { return *this = *this / b; }                                                             \
  friend bool operator<(T a, T b) { return float(a) < float(b); }                                              \
  friend bool operator>(T a, T b) { return float(a) > float(b); }                                              \
  friend bool operator<=(T a, T b) { return float(a) <= float(b); }                                            \
  friend bool operator>=(T a, T b) { return float(a) >= float(b); }                                            \
  friend bool operator==(T a, T b) { return float(a) == float(b); }                                            \
  friend bool operator!=(T a, T b) { return float(a) != float(b); }                                            \
  template <class I, class = std::enable_if_t<std::is_arithmetic_v<I>>> explicit T(I x) : T(from(float(x))) {} \
  T() = default;

namespace cutlass {
struct bfloat16_t {
  uint16_t storage;
  static bfloat16_t from(float x) { return bfloat16_t(__float2bfloat16_rn(x)); }
  static bfloat16_t bitcast(uint16_t s) { bfloat16_t r; r.storage = s; return r; }
  bfloat16_t(__nv_bfloat16 h) { memcpy(this, &h, 2); }
  __nv_bfloat16 to_nv_bfloat16() const { return emu::bit_cast<__nv_bfloat16>(storage); }
  operator float() const { return __uint_as_float(unsigned(storage) << 16); }
  explicit operator __nv_bfloat16() const { return to_nv_bfloat16(); }
  EMU_OPS(bfloat16_t)
};
struct half_t {
  uint16_t storage;
  static half_t from(float x) { return half_t(__float2half_rn(x)); }
  static half_t bitcast(uint16_t s) { half_t r; r.storage = s; return r; }
  half_t(__half h) { memcpy(this, &h, 2); }
  __half to_half() const { return emu::bit_cast<__half>(storage); }
  operator float() const { return __half2float(to_half()); }
  explicit operator __half() const { return to_half(); }
  EMU_OPS(half_t)
};
}  // namespace cutlass
using cutlass::bfloat16_t;
using cutlass::half_t;
// Constants of generated code. The primary template would give 0 for all of them.
#define EMU_LIMITS(T, INFINITE, MOST, LEAST, NOT_A_NUMBER)       \
  template <> struct std::numeric_limits<T> {                    \
    static constexpr bool is_specialized = true;                 \
    static constexpr bool has_infinity = true;                   \
    static T infinity() { return T::bitcast(INFINITE); }         \
    static T max() { return T::bitcast(MOST); }                  \
    static T lowest() { return T::bitcast(LEAST); }              \
    static T quiet_NaN() { return T::bitcast(NOT_A_NUMBER); }    \
  };
EMU_LIMITS(cutlass::bfloat16_t, 0x7f80, 0x7f7f, 0xff7f, 0x7fff)
EMU_LIMITS(cutlass::half_t, 0x7c00, 0x7bff, 0xfbff, 0x7fff)

namespace tl {
template <emu::fp8_kind K> struct fp8 {
  uint8_t storage;
  static fp8 from(float x) { return bitcast(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, K)); }
  static fp8 bitcast(uint8_t s) { fp8 r; r.storage = s; return r; }
  explicit fp8(__nv_bfloat16 x) : fp8(from(__bfloat162float(x))) {}
  explicit fp8(__half x) : fp8(from(__half2float(x))) {}
  explicit fp8(bfloat16_t x) : fp8(from(float(x))) {}
  explicit fp8(half_t x) : fp8(from(float(x))) {}
  operator float() const { return __half2float(__half(__nv_cvt_fp8_to_halfraw(storage, K))); }
  EMU_OPS(fp8)
};
using float_e4m3_t = fp8<__NV_E4M3>;
using float_e5m2_t = fp8<__NV_E5M2>;
struct tfloat32_t {
  float v;
  tfloat32_t() = default;
  tfloat32_t(float x) : v(x) {}
  operator float() const { return v; }
};
}  // namespace tl
using tl::tfloat32_t;
using fp8_e4_t = tl::float_e4m3_t;
using fp8_e5_t = tl::float_e5m2_t;
using fp8_e8_t = __nv_fp8_e8m0;
#define EMU_VEC(P, T)                               \
  struct alignas(2) P##2_t { T x, y; };             \
  struct alignas(4) P##4_t { T x, y, z, w; };       \
  struct alignas(8) P##8_t { P##4_t x, y; };        \
  struct alignas(16) P##16_t { P##8_t x, y; };      \
  struct alignas(32) P##32_t { P##16_t x, y; };
EMU_VEC(fp8_e4_, fp8_e4_t)
EMU_VEC(fp8_e5_, fp8_e5_t)
EMU_VEC(fp8_e8_, fp8_e8_t)
using int4_t = int4;

// ---- fp4: two values in a byte, the first in the low half ------------------------------------------------------
struct fp4_e2_t {
  emu::f4 __x;
  fp4_e2_t() = default;
  fp4_e2_t(__nv_fp4_e2m1 x) : __x(x.__x) {}
  fp4_e2_t(emu::f4 x) : __x(x) {}
  explicit fp4_e2_t(float x) : __x(__nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest)) {}
  explicit fp4_e2_t(bfloat16_t x) : fp4_e2_t(float(x)) {}
  explicit fp4_e2_t(half_t x) : fp4_e2_t(float(x)) {}
  operator float() const { return __half2float(__half(__nv_cvt_fp4_to_halfraw(__x, __NV_E2M1))); }
  operator half_t() const { return half_t(float(*this)); }
  explicit operator bfloat16_t() const { return bfloat16_t(float(*this)); }
};
class fp4_e2_2_t {
public:
  emu::f4x2 __x;
  fp4_e2_2_t() = default;
  fp4_e2_2_t(emu::f4x2 data) : __x(data) {}
  fp4_e2_t x() const { return fp4_e2_t(emu::f4(__x & 0x0f)); }
  fp4_e2_t y() const { return fp4_e2_t(emu::f4(__x >> 4)); }
  void set_x(fp4_e2_t v) { __x = emu::f4x2((__x & 0xf0) | (v.__x & 0x0f)); }
  void set_y(fp4_e2_t v) { __x = emu::f4x2((__x & 0x0f) | (v.__x & 0x0f) << 4); }
};
struct alignas(2) fp4_e2_4_t { fp4_e2_2_t x, y; };
struct alignas(4) fp4_e2_8_t { fp4_e2_4_t x, y; };
struct alignas(8) fp4_e2_16_t { fp4_e2_8_t x, y; };
struct alignas(16) fp4_e2_32_t { fp4_e2_16_t x, y; };
struct alignas(32) fp4_e2_64_t { fp4_e2_32_t x, y; };
inline fp4_e2_t tl_fp4_packed_load(const fp4_e2_2_t *p, int i) { return i & 1 ? p[i >> 1].y() : p[i >> 1].x(); }
inline void tl_fp4_packed_store(fp4_e2_2_t *p, int i, fp4_e2_t v) { if (i & 1) p[i >> 1].set_y(v); else p[i >> 1].set_x(v); }
namespace tl {
template <class V, class... L> V make_fp4_vec(L... lanes) {
  static_assert(sizeof(V) * 2 == sizeof...(lanes), "two fp4 lanes per byte");
  const fp4_e2_t v[] = {lanes...};
  V r;
  auto *bytes = reinterpret_cast<uint8_t *>(&r);
  for (size_t i = 0; i < sizeof(V); ++i) bytes[i] = uint8_t((v[2 * i].__x & 0xf) | (v[2 * i + 1].__x & 0xf) << 4);
  return r;
}
}  // namespace tl
// E2M1 values are exact in every wider type, so widening goes through float without rounding.
inline float __tl_cvt_fp4_to_float(emu::f4 x) { return float(fp4_e2_t(x)); }
inline float2 __tl_cvt_fp4x2_to_float2(emu::f4x2 x) {
  return make_float2(__tl_cvt_fp4_to_float(x & 0xf), __tl_cvt_fp4_to_float(x >> 4));
}
inline __half __tl_cvt_fp4_to_half(emu::f4 x) { return __float2half_rn(__tl_cvt_fp4_to_float(x)); }
inline __half2 __tl_cvt_fp4x2_to_half2(emu::f4x2 x) { return __float22half2_rn(__tl_cvt_fp4x2_to_float2(x)); }
inline double __tl_cvt_fp4_to_double(emu::f4 x) { return __tl_cvt_fp4_to_float(x); }
inline double2 __tl_cvt_fp4x2_to_double2(emu::f4x2 x) { float2 f = __tl_cvt_fp4x2_to_float2(x); return make_double2(f.x, f.y); }
inline __nv_bfloat16 __tl_cvt_fp4_to_bfloat16(emu::f4 x) { return __float2bfloat16(__tl_cvt_fp4_to_float(x)); }
inline __nv_bfloat162 __tl_cvt_fp4x2_to_bfloat162(emu::f4x2 x) { return __float22bfloat162_rn(__tl_cvt_fp4x2_to_float2(x)); }
inline emu::f8 __tl_cvt_e2m1_to_e4m3(emu::f4 x) {
  return __nv_cvt_float_to_fp8(__tl_cvt_fp4_to_float(emu::f4(x & 0xf)), __NV_SATFINITE, __NV_E4M3);
}
inline emu::f8x2 __tl_cvt_e2m1x2_to_e4m3x2(emu::f4x2 x) {
  return emu::f8x2(__tl_cvt_e2m1_to_e4m3(x & 0xf) | __tl_cvt_e2m1_to_e4m3(x >> 4) << 8);
}
inline emu::f8x4 __tl_cvt_e2m1x4_to_e4m3x4(emu::f4x4 x) {
  return emu::f8x4(__tl_cvt_e2m1x2_to_e4m3x2(uint8_t(x)) | uint32_t(__tl_cvt_e2m1x2_to_e4m3x2(uint8_t(x >> 8))) << 16);
}
inline emu::f4 __tl_cvt_float_to_fp4(float x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
inline emu::f4x2 __tl_cvt_float2_to_fp4x2(float2 x) { return __nv_cvt_float2_to_fp4x2(x, __NV_E2M1, cudaRoundNearest); }
inline emu::f4 __tl_cvt_double_to_fp4(double x) { return __nv_cvt_double_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
inline emu::f4x2 __tl_cvt_double2_to_fp4x2(double2 x) { return __nv_cvt_double2_to_fp4x2(x, __NV_E2M1, cudaRoundNearest); }
inline emu::f4 __tl_cvt_half_to_fp4(__half x) { return __nv_cvt_halfraw_to_fp4(__half_raw(x), __NV_E2M1, cudaRoundNearest); }
inline emu::f4x2 __tl_cvt_half2_to_fp4x2(__half2 x) {
  return __nv_cvt_halfraw2_to_fp4x2(__half2_raw(x), __NV_E2M1, cudaRoundNearest);
}
inline emu::f4 __tl_cvt_bfloat16_to_fp4(__nv_bfloat16 x) {
  return __nv_cvt_bfloat16raw_to_fp4(__nv_bfloat16_raw(x), __NV_E2M1, cudaRoundNearest);
}
inline emu::f4x2 __tl_cvt_bfloat162_to_fp4x2(__nv_bfloat162 x) {
  return __nv_cvt_bfloat16raw2_to_fp4x2(__nv_bfloat162_raw(x), __NV_E2M1, cudaRoundNearest);
}

// ---- packed int4 -------------------------------------------------------------------------------------------------
inline int8_t tl_pack_int4x2(int low, int high) { return int8_t((low & 0xf) | (high & 0xf) << 4); }
inline uint8_t tl_pack_uint4x2(unsigned low, unsigned high) { return uint8_t((low & 0xf) | (high & 0xf) << 4); }
inline unsigned tl_uint4_packed_load(const unsigned char *p, int i) { return p[i >> 1] >> 4 * (i & 1) & 0xf; }
inline int tl_int4_packed_load(const signed char *p, int i) {
  return (int(uint8_t(p[i >> 1]) >> 4 * (i & 1) & 0xf) ^ 8) - 8;
}
inline void tl_uint4_packed_store(unsigned char *p, int i, unsigned v) {
  unsigned shift = 4 * (i & 1);
  p[i >> 1] = uint8_t((p[i >> 1] & ~(0xfu << shift)) | (v & 0xf) << shift);
}
inline void tl_int4_packed_store(signed char *p, int i, int v) {
  tl_uint4_packed_store(reinterpret_cast<unsigned char *>(p), i, unsigned(v));
}

// ---- packing ----------------------------------------------------------------------------------------------------------
namespace emu {
template <class V, class E, class... R> inline V pack(E e, R... r) {   // consecutive elements, first one lowest
  E v[] = {e, E(r)...};
  V o;
  static_assert(sizeof v == sizeof o);
  memcpy(&o, v, sizeof o);
  return o;
}
}  // namespace emu
// Constructors of vectors in the code of TileLang before 0.1.15.
#define EMU_MAKE(P, N, T) \
  template <class... R> inline P##N##_t make_##P##N##_t(T e, R... r) { return emu::pack<P##N##_t>(e, r...); }
#define EMU_MAKE_FP8(P) \
  EMU_MAKE(P, 2, P##t) EMU_MAKE(P, 4, P##t) EMU_MAKE(P, 8, P##t) EMU_MAKE(P, 16, P##t) EMU_MAKE(P, 32, P##t)
EMU_MAKE_FP8(fp8_e4_)
EMU_MAKE_FP8(fp8_e5_)
EMU_MAKE_FP8(fp8_e8_)
#define EMU_MAKE_FP4(N) \
  template <class... R> fp4_e2_##N##_t make_fp4_e2_##N##_t(R... lanes) { return tl::make_fp4_vec<fp4_e2_##N##_t>(lanes...); }
EMU_MAKE_FP4(2) EMU_MAKE_FP4(4) EMU_MAKE_FP4(8) EMU_MAKE_FP4(16) EMU_MAKE_FP4(32)
template <class T> inline unsigned __pack_half2(T x, T y) { static_assert(sizeof(T) == 2); return emu::pack<unsigned>(x, y); }
inline unsigned __pack_nv_bfloat162(bfloat16_t x, bfloat16_t y) { return emu::pack<unsigned>(x, y); }
using schar = signed char;
inline int make_int(schar a, schar b, schar c, schar d) { return emu::pack<int>(a, b, c, d); }
inline unsigned make_uint(uchar a, uchar b, uchar c, uchar d) { return emu::pack<unsigned>(a, b, c, d); }
template <class... R> inline int2 make_int2(schar a, schar b, schar c, R... r) { return emu::pack<int2>(a, b, c, r...); }
template <class... R> inline uint2 make_uint2(uchar a, uchar b, uchar c, R... r) { return emu::pack<uint2>(a, b, c, r...); }
template <class... R> inline int4 make_int4(schar a, schar b, schar c, schar d, schar e, R... r) {
  return emu::pack<int4>(a, b, c, d, e, r...);
}
template <class... R> inline uint4 make_uint4(uchar a, uchar b, uchar c, uchar d, uchar e, R... r) {
  return emu::pack<uint4>(a, b, c, d, e, r...);
}
inline int4 make_int4(short a, short b, short c, short d, short e, short f, short g, short h) {
  return emu::pack<int4>(a, b, c, d, e, f, g, h);
}
inline uint4 make_uint4(ushort a, ushort b, ushort c, ushort d, ushort e, ushort f, ushort g, ushort h) {
  return emu::pack<uint4>(a, b, c, d, e, f, g, h);
}
inline longlong4 make_longlong4(int a, int b, int c, int d, int e, int f, int g, int h) {
  return emu::pack<longlong4>(a, b, c, d, e, f, g, h);
}
template <class... R> inline longlong4 make_longlong4(schar a, schar b, schar c, schar d, schar e, schar f, schar g, schar h, schar i, R... r) {
  return emu::pack<longlong4>(a, b, c, d, e, f, g, h, i, r...);
}
template <class... R> inline ulonglong4 make_ulonglong4(uchar a, uchar b, uchar c, uchar d, uchar e, R... r) {
  return emu::pack<ulonglong4>(a, b, c, d, e, r...);
}

// ---- fp8 conversions ---------------------------------------------------------------------------------------------------
inline float2 __tl_cvt_fp8x2_to_float2(emu::f8x2 x, emu::fp8_kind k) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(x, k)));
}
inline __half2 __tl_cvt_fp8x2_to_half2(emu::f8x2 x, emu::fp8_kind k) { return __half2(__nv_cvt_fp8x2_to_halfraw2(x, k)); }
inline emu::f8x2 __tl_cvt_half2_to_fp8x2(__half2 x, emu::fp8_kind k) {
  return __nv_cvt_halfraw2_to_fp8x2(__half2_raw(x), __NV_SATFINITE, k);
}
inline __half __tl_cvt_fp8_to_half(emu::f8 x, emu::fp8_kind k) { return __half(__nv_cvt_fp8_to_halfraw(x, k)); }
inline emu::f8 __tl_cvt_half_to_fp8(__half x, emu::fp8_kind k) {
  return __nv_cvt_halfraw_to_fp8(__half_raw(x), __NV_SATFINITE, k);
}
inline emu::f8 __tl_cvt_bfloat16_to_fp8(__nv_bfloat16 x, emu::fp8_kind k) {
  return __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw(x), __NV_SATFINITE, k);
}
inline __nv_bfloat16 __tl_cvt_fp8_to_bfloat16(emu::f8 x, emu::fp8_kind k) {
  return __float2bfloat16(__half2float(__tl_cvt_fp8_to_half(x, k)));
}
inline __nv_bfloat162 __tl_cvt_e4m3x2_to_bfloat162(emu::f8x2 x) {
  return __float22bfloat162_rn(__tl_cvt_fp8x2_to_float2(x, __NV_E4M3));
}
inline __nv_bfloat162 __tl_cvt_e5m2x2_to_bfloat162(emu::f8x2 x) {
  return __float22bfloat162_rn(__tl_cvt_fp8x2_to_float2(x, __NV_E5M2));
}
inline emu::f8x2 __tl_cvt_bfloat162_to_fp8x2(__nv_bfloat162 x, emu::fp8_kind k) {
  return __nv_cvt_bfloat16raw2_to_fp8x2(__nv_bfloat162_raw(x), __NV_SATFINITE, k);
}
inline emu::f8 __tl_cvt_float_to_e8m0(float x) { return __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf); }
inline emu::f8x2 __tl_cvt_float2_to_e8m0x2(float2 x) {
  return __nv_cvt_float2_to_e8m0x2(x, __NV_SATFINITE, cudaRoundPosInf);
}
inline emu::f8 __tl_cvt_double_to_e8m0(double x) { return __nv_cvt_double_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf); }
inline emu::f8x2 __tl_cvt_double2_to_e8m0x2(double2 x) {
  return __nv_cvt_double2_to_e8m0x2(x, __NV_SATFINITE, cudaRoundPosInf);
}
inline emu::f8 __tl_cvt_bfloat16_to_e8m0(__nv_bfloat16 x) {
  return __nv_cvt_bfloat16raw_to_e8m0(__nv_bfloat16_raw(x), __NV_SATFINITE, cudaRoundPosInf);
}
inline emu::f8x2 __tl_cvt_bfloat162_to_e8m0x2(__nv_bfloat162 x) {
  return __nv_cvt_bfloat162raw_to_e8m0x2(__nv_bfloat162_raw(x), __NV_SATFINITE, cudaRoundPosInf);
}
inline __nv_bfloat16 __tl_cvt_e8m0_to_bfloat16(emu::f8 x) { return __nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(x)); }
inline __nv_bfloat162 __tl_cvt_e8m0x2_to_bfloat162(emu::f8x2 x) { return __nv_bfloat162(__nv_cvt_e8m0x2_to_bf162raw(x)); }

// ---- 16-bit math: in float, rounded once ------------------------------------------------------------------------------
#define EMU_H1(N, EXPR)                                                     \
  inline bfloat16_t N(bfloat16_t v) { float x = v; return bfloat16_t(EXPR); } \
  inline half_t N(half_t v) { float x = v; return half_t(EXPR); }
#define EMU_H2(N, EXPR)                                                                        \
  inline bfloat16_t N(bfloat16_t v, bfloat16_t u) { float x = v, y = u; return bfloat16_t(EXPR); } \
  inline half_t N(half_t v, half_t u) { float x = v, y = u; return half_t(EXPR); }
EMU_H1(__habs, std::fabs(x)) EMU_H1(hexp, std::exp(x)) EMU_H1(hexp2, std::exp2(x)) EMU_H1(hexp10, std::pow(10.f, x))
EMU_H1(hlog, std::log(x)) EMU_H1(hlog2, std::log2(x)) EMU_H1(hlog10, std::log10(x))
EMU_H1(hsqrt, std::sqrt(x)) EMU_H1(hrsqrt, rsqrtf(x)) EMU_H1(hrcp, 1.f / x)
EMU_H1(hsin, std::sin(x)) EMU_H1(hcos, std::cos(x)) EMU_H1(htan, std::tan(x)) EMU_H1(hatan, std::atan(x))
EMU_H1(hsinh, std::sinh(x)) EMU_H1(hcosh, std::cosh(x)) EMU_H1(htanh, std::tanh(x)) EMU_H1(herf, std::erf(x))
EMU_H1(hfloor, std::floor(x)) EMU_H1(hceil, std::ceil(x)) EMU_H1(hrint, std::nearbyint(x))
EMU_H1(hnearbyint, std::nearbyint(x)) EMU_H1(htrunc, std::trunc(x))
EMU_H2(__hadd_rn, x + y) EMU_H2(__hsub_rn, x - y) EMU_H2(__hmul_rn, x * y)
EMU_H2(__hdiv, x / y) EMU_H2(hpow, std::pow(x, y)) EMU_H2(hfmod, std::fmod(x, y))
// A product of two 16-bit values and the sum with a third fit a double closely enough for one correct rounding.
inline bfloat16_t __hfma(bfloat16_t a, bfloat16_t b, bfloat16_t c) {
  return bfloat16_t(__double2bfloat16(std::fma(double(float(a)), double(float(b)), double(float(c)))));
}
inline half_t __hfma(half_t a, half_t b, half_t c) {
  return half_t(__double2half(std::fma(double(float(a)), double(float(b)), double(float(c)))));
}
template <class T> inline T max(T a, std::enable_if_t<std::is_class_v<T> && sizeof(T) <= 2, T> b) {
  return T(emu::max_num(float(a), float(b)));
}
template <class T> inline T min(T a, std::enable_if_t<std::is_class_v<T> && sizeof(T) <= 2, T> b) {
  return T(emu::min_num(float(a), float(b)));
}
