// Matrix instructions: ldmatrix, stmatrix and mma.sync as warp operations, wgmma from shared-memory descriptors.
// Products are exact in double; a k-slice is summed in double and rounded once into the accumulator.
#pragma once
#include "async.h"
namespace SM80::MMA { enum class SparseSel { Zero, One }; }
namespace cute::SM90::GMMA { enum class SparseSel { Zero, One }; }
namespace tl {
template <DataType D> EMU_RT double elem(const void *base, size_t i) {
  const char *p = static_cast<const char *>(base);
  if constexpr (D == DataType::kBFloat16) { bfloat16_t v; memcpy(&v, p + 2 * i, 2); return float(v); }
  else if constexpr (D == DataType::kFloat16) { half_t v; memcpy(&v, p + 2 * i, 2); return float(v); }
  else if constexpr (D == DataType::kFloat8_e4m3) return float(float_e4m3_t::bitcast(uint8_t(p[i])));
  else if constexpr (D == DataType::kFloat8_e5m2) return float(float_e5m2_t::bitcast(uint8_t(p[i])));
  else if constexpr (D == DataType::kInt8) return int8_t(p[i]);
  else if constexpr (D == DataType::kUInt8) return uint8_t(p[i]);
  else if constexpr (D == DataType::kInt4) return ((uint8_t(p[i / 2]) >> i % 2 * 4 & 15) ^ 8) - 8;
  else if constexpr (D == DataType::kUInt4) return uint8_t(p[i / 2]) >> i % 2 * 4 & 15;
  else if constexpr (D == DataType::kTensorFloat32) { uint32_t u; memcpy(&u, p + 4 * i, 4); return __uint_as_float(u & 0xffffe000u); }
  else {
    static_assert(D == DataType::kFloat64, "mma element type not supported by the emulator");
    double v;
    memcpy(&v, p + 8 * i, 8);
    return v;
  }
}
template <DataType D> constexpr int bytes_of() {
  static_assert(D != DataType::kInt4 && D != DataType::kUInt4, "half a byte");
  return D == DataType::kBFloat16 || D == DataType::kFloat16 ? 2 : D == DataType::kTensorFloat32 ? 4 : D == DataType::kFloat64 ? 8 : 1;
}
template <DataType C> constexpr int bytes_of_c() { return C == DataType::kFloat16 ? 2 : C == DataType::kFloat64 ? 8 : 4; }
template <DataType D> constexpr int per_register() {   // elements in 32 bits
  if constexpr (D == DataType::kInt4 || D == DataType::kUInt4) return 8; else return 4 / bytes_of<D>();
}
template <DataType D> constexpr int register_bytes(int elements) {   // of one lane, when a warp holds `elements`
  if constexpr (D == DataType::kInt4 || D == DataType::kUInt4) return elements / 64; else return elements * bytes_of<D>() / 32;
}
template <DataType C> EMU_RT void accumulate(void *c, int i, double s, bool keep) {
  if constexpr (C == DataType::kFloat32) {
    float &f = static_cast<float *>(c)[i];
    f = float((keep ? double(f) : 0.0) + s);
    if (f != f) f = __builtin_nanf("0x3fffff");  // the one NaN of the matrix units, 0x7fffffff
  }
  else if constexpr (C == DataType::kFloat16) { half_t &f = static_cast<half_t *>(c)[i]; f = half_t((keep ? double(float(f)) : 0.0) + s); }
  else if constexpr (C == DataType::kInt32) { int &f = static_cast<int *>(c)[i]; f = (keep ? f : 0) + int(s); }
  else {
    static_assert(C == DataType::kFloat64, "mma accumulator type not supported by the emulator");
    double &f = static_cast<double *>(c)[i];
    f = (keep ? f : 0.0) + s;
  }
}

// ---- structured sparsity ----------------------------------------------------------------------------------------------
// A sparse product gets half of A's elements and, in one register of some lanes, 4 bits for each group: of four elements
// (two: for tf32) the places of the two (one) that are stored. kDense stands for the selector of an ordinary product.
constexpr int kDense = -1;
template <int K, int SEL> constexpr int stored() { return SEL == kDense ? K : K / 2; }
// From the stored elements of 16 rows to all of them. `meta` are the registers of a warp.
template <DataType A, int K, int SEL> EMU_RT void expand(const double *packed, const uint32_t *meta, double *a) {
  constexpr int SZ = bytes_of<A>(), GROUP = SZ == 4 ? 2 : 4, KEPT = GROUP / 2;
  constexpr int LANES = K / GROUP / 4;                 // whose halves of a register hold a row; for bytes: whole ones
  static_assert(SZ == 1 ? K == 64 && SEL == 0 : (LANES == 1 || LANES == 2) && SEL < 4 / LANES, "a sparse product of this shape");
  for (int m = 0; m < 16; ++m) for (int g = 0; g < K / GROUP; ++g) {
    int lane = SZ == 1 ? m % 8 * 4 + m / 8 + g / 8 * 2 : m % 8 * 4 + SEL * LANES + g / 4;
    unsigned code = meta[lane] >> (SZ == 1 ? g % 8 * 4 : m / 8 * 16 + g % 4 * 4) & 15;
    const double *from = packed + m * (K / 2) + g * KEPT;
    double *to = a + m * K + g * GROUP;
    for (int i = 0; i < GROUP; ++i) to[i] = 0;
    bool valid = SZ == 4 ? code == 4 || code == 14 : (code & 3) < code >> 2;
    if (SZ == 4) to[code == 14] = from[0]; else { to[code & 3] = from[0]; to[code >> 2] += from[1]; }
    if (!valid && (from[0] != 0 || from[KEPT - 1] != 0))
      return emu::note_failure("metadata", "sparse product: the metadata 0x%x of row %d, elements %d to %d, is none that the hardware defines%s", code, m,
                               g * GROUP, g * GROUP + GROUP - 1, SZ == 4 ? " (0x4 or 0xe)" : " (two places in ascending order)");
  }
}

// ---- mma.sync, the m16n8 family ---------------------------------------------------------------------------------------
struct MmaArg { void *c; const void *a, *b; uint32_t meta; };
template <DataType A, DataType B, DataType C, int K, int SEL> EMU_RT void mma_fn(unsigned lanes, void **args) {
  if (lanes != ~0u) return emu::note_failure("divergence", "mma.sync needs all 32 lanes");
  constexpr int EA = per_register<A>(), KA = stored<K, SEL>();   // elements per register
  double packed[16][KA], full[16][K], b[K][8];
  uint32_t meta[32];
  for (int l = 0; l < 32; ++l) {
    auto *x = static_cast<MmaArg *>(args[l]);
    int g = l / 4, t = l % 4;
    meta[l] = x->meta;
    for (int h = 0; h < K / (4 * EA); ++h) for (int e = 0; e < EA; ++e) {
      int k = h * 4 * EA + t * EA + e;
      for (int r = 0; r < 2 && k < KA; ++r) packed[g + 8 * r][k] = elem<A>(x->a, size_t(h * 2 + r) * EA + e);
      b[k][g] = elem<B>(x->b, size_t(h) * EA + e);
    }
  }
  double(*a)[K] = full;
  if constexpr (SEL == kDense) a = packed; else expand<A, K, SEL>(packed[0], meta, full[0]);
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) {
      int m = l / 4 + 8 * (i / 2), n = l % 4 * 2 + i % 2;
      double s = 0;
      for (int k = 0; k < K; ++k) s += a[m][k] * b[k][n];
      accumulate<C>(static_cast<MmaArg *>(args[l])->c, i, s, true);
    }
}
template <DataType A, DataType B, DataType C, int K, int SEL> EMU_RT void mma_lanes(void *c, const void *a, const void *b, uint32_t meta) {
  MmaArg x{c, a, b, meta};
  emu::access(a, register_bytes<A>(16 * stored<K, SEL>()), emu::READ);
  emu::access(b, register_bytes<B>(8 * K), emu::READ);
  emu::access(c, 4 * bytes_of_c<C>(), emu::READ);
  emu::collective(~0u, mma_fn<A, B, C, K, SEL>, &x);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool TA, bool TB, bool Sat = false, class X, class Y, class Z>
EMU_RT void mma_sync(X *c, const Y *a, const Z *b) {
  static_assert(M == 16 && N == 8, "the emulator has the m16n8 family of mma.sync only");
  mma_lanes<A, B, C, K, kDense>(c, a, b, 0);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool TA, bool TB, SM80::MMA::SparseSel SEL, class X, class Y, class Z>
EMU_RT void mma_sp_sync(X *c, const Y *a, const Z *b, const uint32_t *meta) {
  emu::access(meta, 4, emu::READ);
  mma_lanes<A, B, C, K, int(SEL)>(c, a, b, *meta);
}

// ---- ldmatrix, stmatrix: lane 8m + r holds the address of row r of matrix m -------------------------------------------------
struct LdArg { void *smem, *reg; };
template <int X, bool TRANS, bool STORE> EMU_RT void ldsm_fn(unsigned lanes, void **args) {
  if (lanes != ~0u) return emu::note_failure("divergence", "ldmatrix and stmatrix need all 32 lanes");
  for (int m = 0; m < X; ++m) for (int l = 0; l < 32; ++l) for (int e = 0; e < 2; ++e) {
    int row = TRANS ? l % 4 * 2 + e : l / 4, col = TRANS ? l / 4 : l % 4 * 2 + e;
    auto *s = static_cast<uint16_t *>(static_cast<LdArg *>(args[m * 8 + row])->smem) + col;
    auto *r = static_cast<uint16_t *>(static_cast<LdArg *>(args[l])->reg) + 2 * m + e;
    emu::access(s, 2, STORE ? emu::WRITE : emu::READ);
    if (STORE) *s = *r; else *r = *s;
  }
}
template <int X, bool TRANS, bool STORE> EMU_RT void ldsm(const void *s, void *r) {
  LdArg a{const_cast<void *>(s), r};
  if (STORE) emu::access(r, 4 * X, emu::READ); else emu::defined(r, 4 * X);
  emu::collective(~0u, ldsm_fn<X, TRANS, STORE>, &a);
}
template <int X, bool TRANS, class... R> EMU_RT void stsm(const void *s, R... r) { int v[] = {int(r)...}; ldsm<X, TRANS, true>(s, v); }
#define EMU_LDSM(X)                                                                                              \
  inline void ptx_ldmatrix_x##X(const void *s, void *r) { ldsm<X, false, false>(s, r); }                         \
  inline void ptx_ldmatrix_x##X##_trans(const void *s, void *r) { ldsm<X, true, false>(s, r); }                  \
  template <class... R> void ptx_stmatrix_m8n8_x##X(const void *s, R... r) { stsm<X, false>(s, r...); }          \
  template <class... R> void ptx_stmatrix_m8n8_x##X##_trans(const void *s, R... r) { stsm<X, true>(s, r...); }   \
  template <class... R> void ptx_stmatrix_x##X(const void *s, R... r) { stsm<X, false>(s, r...); }               \
  template <class... R> void ptx_stmatrix_x##X##_trans(const void *s, R... r) { stsm<X, true>(s, r...); }
EMU_LDSM(1) EMU_LDSM(2) EMU_LDSM(4)

// ---- wgmma --------------------------------------------------------------------------------------------------------------------
// The two bits above the hardware's 14 address bits are free, which gives the emulator a 1 MB arena.
struct GmmaDescriptor {
  uint32_t addr = 0, lbo = 0, sbo = 0, mode = 0;   // unpacked; the generated code adds to it and casts it to 64 bits
  operator uint64_t() const {
    return uint64_t(addr >> 4 & 0xffff) | uint64_t(lbo & 0x3fff) << 16 | uint64_t(sbo & 0x3fff) << 32 | uint64_t(mode) << 62;
  }
  template <class T> GmmaDescriptor operator+(T o) const { GmmaDescriptor d = *this; d.addr += uint32_t(o) << 4; return d; }
};
template <int MODE = 0, int LBO = 0, int SBO = 0, class T> void initialize_wgmma_descriptor(GmmaDescriptor &d, T *p) {
  d.addr = emu::smem_addr(p); d.lbo = LBO; d.sbo = SBO; d.mode = MODE;
}
template <class T> void increase_descriptor_offset(GmmaDescriptor &d, T off) { d.addr += uint32_t(off); }

// Byte address of element (mn, k) of an operand. mode: 0 none, 1 128-byte, 2 64-byte, 3 32-byte swizzle.
template <bool MN_MAJOR, int SZ> EMU_RT inline const char *gmma_at(uint64_t d, int mn, int k) {
  uint32_t base = uint32_t(d & 0xffff) << 4, lbo = uint32_t(d >> 16 & 0x3fff) << 4, sbo = uint32_t(d >> 32 & 0x3fff) << 4;
  int mode = int(d >> 62);
  uint32_t row = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16, a;
  if (!MN_MAJOR) {
    uint32_t kb = uint32_t(k) * SZ;
    a = mode ? base + mn / 8 * sbo + mn % 8 * row + kb : base + mn / 8 * sbo + mn % 8 * 16 + kb / 16 * lbo + kb % 16;
  } else {
    uint32_t mb = uint32_t(mn) * SZ;
    a = mode ? base + mb / row * lbo + mb % row + k % 8 * row + k / 8 * sbo : base + mb / 16 * sbo + mb % 16 + k % 8 * 16 + k / 8 * lbo;
  }
  uint32_t bits = mode == 1 ? 7 : mode == 2 ? 3 : mode == 3 ? 1 : 0;
  return emu::smem_ptr(a ^ ((a >> 7 & bits) << 4));
}
// Reads `rows` x K elements of an operand into doubles, checking 16-byte runs instead of single elements.
template <DataType D, bool MN_MAJOR, int K> EMU_RT void gmma_operand(uint64_t d, int first, int rows, double *out) {
  constexpr int SZ = bytes_of<D>();
  for (int r = 0; r < rows; ++r) for (int k = 0; k < K; ++k) {
    const char *p = gmma_at<MN_MAJOR, SZ>(d, first + r, k);
    bool run_start = MN_MAJOR ? (first + r) * SZ % 16 == 0 : k * SZ % 16 == 0;
    if (run_start) emu::access(p, 16, emu::READ);
    out[r * K + k] = elem<D>(p, 0);
  }
}
// From issue to wait the operands may not be overwritten; lane 0 marks them for its warp.
template <DataType D, bool MN_MAJOR, int K> EMU_RT void gmma_mark(uint64_t d, int first, int rows, bool on) {
  constexpr int SZ = bytes_of<D>(), RUN = 16 / SZ;
  for (int r = 0; r < rows; r += MN_MAJOR ? RUN : 1) for (int k = 0; k < K; k += MN_MAJOR ? 1 : RUN)
    emu::mark_operand(gmma_at<MN_MAJOR, SZ>(d, first + r, k), 16, on, int(d >> 62));
}
// A warp computes its 16 rows together: B is read once per warp, by the last lane to arrive.
struct WgmmaArg { const void *a; uint64_t da, db; void *c; bool keep; uint32_t meta; };
static_assert(sizeof(WgmmaArg) <= emu::kDeferredBytes);
template <DataType A, DataType B, DataType C, int N, int K, bool TA, bool TB, bool A_IN_REGS, int SCALE, int SEL>
EMU_RT void wgmma_fn(unsigned lanes, void **args) {
  if (lanes != ~0u) return emu::note_failure("divergence", "wgmma needs all 32 lanes of a warp");
  constexpr int KA = stored<K, SEL>();
  static double packed[16 * KA], full[16 * K], b[N * K];   // not on the fiber's stack; one OS thread runs all fibers
  double *a = SEL == kDense ? packed : full;
  auto *first = static_cast<WgmmaArg *>(args[0]);
  if constexpr (A_IN_REGS) {
    constexpr int EA = 4 / bytes_of<A>();
    for (int l = 0; l < 32; ++l) for (int h = 0; h < KA / (4 * EA); ++h) for (int r = 0; r < 2; ++r) for (int e = 0; e < EA; ++e)
      packed[(l / 4 + 8 * r) * KA + h * 4 * EA + l % 4 * EA + e] = elem<A>(static_cast<WgmmaArg *>(args[l])->a, size_t(h * 2 + r) * EA + e);
  } else {
    gmma_operand<A, TA, KA>(first->da, emu::self->warp % 4 * 16, 16, packed);
  }
  if constexpr (SEL != kDense) {
    uint32_t meta[32];
    for (int l = 0; l < 32; ++l) meta[l] = static_cast<WgmmaArg *>(args[l])->meta;
    expand<A, K, SEL>(packed, meta, full);
  }
  gmma_operand<B, TB, K>(first->db, 0, N, b);
  if (emu::marks_operands()) {
    if constexpr (!A_IN_REGS) gmma_mark<A, TA, KA>(first->da, emu::self->warp % 4 * 16, 16, false);
    gmma_mark<B, TB, K>(first->db, 0, N, false);
  }
  for (int l = 0; l < 32; ++l) {
    auto *x = static_cast<WgmmaArg *>(args[l]);
    for (int i = 0; i < N / 2; ++i) {
      int m = l / 4 + 8 * (i / 2 % 2), n = i / 4 * 8 + l % 4 * 2 + i % 2;
      double s = 0;
      for (int k = 0; k < K; ++k) s += a[m * K + k] * b[n * K + k];
      accumulate<C>(x->c, i, s * SCALE, x->keep);
    }
  }
}
template <DataType C, int N> EMU_RT void wgmma_registers(void *c, bool keep) {
  if (keep) emu::access(c, N / 2 * bytes_of_c<C>(), emu::READ); else emu::defined(c, N / 2 * bytes_of_c<C>());
}
template <DataType A, DataType B, DataType C, int N, int K, bool TA, bool TB, int SCALE, int SEL>
EMU_RT void start_wgmma_ss(uint64_t da, uint64_t db, uint32_t *c, bool keep, uint32_t meta) {
  WgmmaArg x{nullptr, da, db, c, keep, meta};
  wgmma_registers<C, N>(c, keep);
  if (emu::self->lane == 0 && emu::marks_operands()) {
    gmma_mark<A, TA, stored<K, SEL>()>(da, emu::self->warp % 4 * 16, 16, true);
    gmma_mark<B, TB, K>(db, 0, N, true);
  }
  emu::defer(wgmma_fn<A, B, C, N, K, TA, TB, false, SCALE, SEL>, &x, sizeof x);
}
template <DataType A, DataType B, DataType C, int N, int K, bool TA, bool TB, int SCALE, int SEL>
EMU_RT void start_wgmma_rs(const uint32_t *a, uint64_t db, uint32_t *c, bool keep, uint32_t meta) {
  WgmmaArg x{a, 0, db, c, keep, meta};
  emu::access(a, register_bytes<A>(16 * stored<K, SEL>()), emu::READ);
  wgmma_registers<C, N>(c, keep);
  if (emu::self->lane == 0 && emu::marks_operands()) gmma_mark<B, TB, K>(db, 0, N, true);
  emu::defer(wgmma_fn<A, B, C, N, K, TA, TB, true, SCALE, SEL>, &x, sizeof x);
}
using cute::SM90::GMMA::SparseSel;
#define EMU_WGMMA template <DataType A, DataType B, DataType C, int M, int N, int K, bool TA, bool TB, int SA = 1, int SB = 1
EMU_WGMMA> EMU_RT void wgmma_ss(uint64_t da, uint64_t db, uint32_t *c, bool keep) {
  start_wgmma_ss<A, B, C, N, K, TA, TB, SA * SB, kDense>(da, db, c, keep, 0);
}
EMU_WGMMA> EMU_RT void wgmma_rs(const uint32_t *a, uint64_t db, uint32_t *c, bool keep) {
  start_wgmma_rs<A, B, C, N, K, TA, TB, SA * SB, kDense>(a, db, c, keep, 0);
}
EMU_WGMMA, SparseSel SEL = SparseSel::Zero> EMU_RT void wgmma_sp_ss(uint64_t da, uint64_t db, uint32_t *c, bool keep, uint32_t meta) {
  start_wgmma_ss<A, B, C, N, K, TA, TB, SA * SB, int(SEL)>(da, db, c, keep, meta);
}
EMU_WGMMA, SparseSel SEL = SparseSel::Zero> EMU_RT void wgmma_sp_rs(const uint32_t *a, uint64_t db, uint32_t *c, bool keep, uint32_t meta) {
  start_wgmma_rs<A, B, C, N, K, TA, TB, SA * SB, int(SEL)>(a, db, c, keep, meta);
}
#undef EMU_WGMMA
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() { emu::defer_commit(); }
template <int N> void warpgroup_wait() { emu::defer_wait(N); }
template <int N> void wait_wgmma() { emu::defer_wait(N); }
template <class T> void warpgroup_fence_operand(T *, int) {}
// rewrite.py adds the second number of __launch_bounds__ where it is not 1.
template <uint32_t R> EMU_INLINE void warpgroup_reg_alloc(int min_blocks = 1) { emu::set_registers(R, true, min_blocks); }
template <uint32_t R> EMU_INLINE void warpgroup_reg_dealloc(int min_blocks = 1) { emu::set_registers(R, false, min_blocks); }
}  // namespace tl
