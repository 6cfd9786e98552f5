// The interface between a generated kernel and the emulator's runtime (runtime.cpp).
//
// A kernel is one translation unit, compiled against these headers; the runtime is compiled once and shared.
// In check mode only the kernel is instrumented. Header code that does the emulator's own work carries
// EMU_RT so that it is not checked as if the kernel had written it; where it touches memory on the kernel's
// behalf it says so by calling emu::access.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <math_constants.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#define EMU_RT __attribute__((no_sanitize("thread")))
#define EMU_INLINE __attribute__((always_inline)) inline   // so that the runtime sees the generated line as its caller
#ifdef EMU_RUNTIME
#define EMU_CONST   // the runtime sets these before it resumes a thread ...
#else
#define EMU_CONST const   // ... for which they never change
#endif

#pragma GCC visibility push(default)
// Plain variables, not macros: T.use_swizzle declares a local named blockIdx.
extern EMU_CONST uint3 threadIdx, blockIdx, blockDim, gridDim;
static constexpr int warpSize = 32;

namespace emu {

// ---- what Python passes in and gets back; mirrored by ctypes in launch.py ---------------------------------
struct Traffic {
  uint64_t read, written, atomic;            // bytes moved by the accesses of one launch
  uint64_t distinct_read, distinct_written;  // bytes touched at least once
};
struct Range {
  const char *name;
  char *base;
  uint64_t size;
  uint32_t elem_bits;
  uint32_t fresh;       // its content is undefined until the kernel writes it
  Traffic traffic;
};
struct Event {           // of the failing block: a warp arrives at a barrier (0), a barrier completes (1), a wait (2)
  uint32_t serial;
  int32_t what, warp, barrier, line;   // barrier: its number, or 100 + the index of an mbarrier; line: generated, or 0
};
struct SharedMap { char name[48]; uint32_t offset, size, elem_bits, planned; };   // planned: TileLang's offset + 1, or 0
constexpr int kMaxEvents = 256, kMaxMaps = 64;
struct Failure {
  char kind[24], text[1000], buffer[80];
  int64_t offset, element;
  uint32_t block[3], thread[3];
  void *pcs[24];
  void *other_pc;   // the access this one conflicts with, where known
  int32_t num_pcs, has_thread, num_events, num_maps;
  Event events[kMaxEvents];
  SharedMap maps[kMaxMaps];
};
constexpr int kMaxSites = 16;
struct Launch {
  uint32_t grid[3], block[3];
  uint64_t dyn_bytes;
  int32_t order;        // 0 forward, 1 reverse, 2 random
  uint32_t seed;
  int32_t cooperative;  // keep every block resident, as a grid barrier needs
  int32_t check;        // bounds, alignment, races
  int32_t async_late;   // 1: asynchronous copies land as late as the program allows, 0: when they are issued
  int32_t num_ranges;
  Range *ranges;
  Failure *failure;
  uint64_t blocks, threads, barriers, warp_ops, async_ops;  // results
  // Reads of undefined memory, by instruction. `blamed`: reads there get another value than usual, or fail if `strict`.
  uint32_t blamed, strict, num_sites, sites[kMaxSites];
  uint32_t cluster[3];  // blocks of a cluster; zeros: none
};
struct TensorMap {  // the meaning of a CUtensorMap, unpacked
  char *base;
  int32_t elem_bytes, rank, swizzle, kind;  // kind: the CUtensorMapDataType
  int64_t dims[5], strides[5];              // strides in bytes
  int32_t box[5];                           // of im2col: channels, pixels
  int32_t steps[5], lower[3], upper[3];     // of im2col: traversal strides, corners of the pixel box
  int32_t offset[3], im2col;                // of im2col: filter offsets of one copy; 1, else 0
};

// ---- the running CUDA thread -------------------------------------------------------------------------------
struct Thread {
  int lin, warp, lane;
};
extern Thread *self;

// ---- failing: the first failure of a launch is kept, the thread never continues ------------------------------
[[noreturn]] void fail(const char *kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
void note_failure(const char *kind, const char *format, ...) __attribute__((format(printf, 2, 3)));

// ---- synchronisation -------------------------------------------------------------------------------------------
// `line` tells barriers of the program apart. An address would not: the compiler may duplicate a call.
void bar_sync(int id, int count, bool wait = true, int line = __builtin_LINE());
enum BarReduce { BAR_OR, BAR_AND, BAR_COUNT };
int bar_reduce(BarReduce op, int predicate, int line);
void grid_sync();
// Clusters: blocks that run together and reach each other's shared memory.
void cluster_arrive();
void cluster_wait();
uint3 cluster_shape();
int cluster_rank();
char *map_shared(const void *p, int rank);           // the same place in another block of the cluster
void yield();
void polled(bool changed);                           // after an atomic: one that changes nothing may be a wait
void fence(bool block_only = false);                 // __threadfence: publishes and acquires through atomics
void atomic_order(const void *p, int order);         // the C++ memory order of an atomic about to happen
// Warp operation: every lane publishes `arg` and blocks; the last to arrive computes all results.
using CollFn = void (*)(unsigned lanes, void **args);
void collective(unsigned mask, CollFn fn, void *arg);
// Asynchronous warp operation (wgmma): runs at the wait, on a copy of `arg`.
constexpr size_t kDeferredBytes = 48;
void defer(CollFn fn, const void *arg, size_t bytes);
void defer_commit();
void defer_wait(int keep);
bool marks_operands();                                     // check mode with late operations
void mark_operand(const void *p, size_t bytes, bool on, int swizzle = -1);   // must not be written while on
void proxy_fence();                                        // fence.proxy.async
unsigned live_lanes();
void set_registers(int count, bool increase, int min_blocks);   // setmaxnreg, by every thread of a warpgroup

// ---- memory ------------------------------------------------------------------------------------------------------
enum Access { READ, WRITE, ATOMIC, ATOMIC_READ };
void access(const void *p, size_t bytes, Access kind);
void global_only(const void *p, size_t bytes, const char *what);   // an instruction without a form for shared memory
// A vector access needs its full alignment, although g++ may split it into narrower ones that do not.
void require_aligned(const void *p, size_t bytes, Access kind);
// planned: where TileLang puts it; buffers that overlap there must not both be in use.
char *shared_buf(const char *name, size_t bytes, int elem_bits, size_t align, int planned = -1);
char *dyn_shared(const char *name, size_t bytes, int elem_bits);            // bytes 0: all of it
void name_shared(const char *name, void *p, size_t bytes, int elem_bits);  // a named part of the merged arena
// An array of one thread, for as long as it is in scope: undefined until written. Its address escapes here, so the
// compiler keeps it in memory and instruments its accesses. rewrite.py puts a margin on both sides.
struct Local {
  static constexpr uint32_t kMargin = 64;
  const char *name;
  char *base;
  uint32_t bytes, elem_bytes;
  Local *outer;
  template <class T, size_t N> Local(const char *n, T (&a)[N]) : name(n), base(reinterpret_cast<char *>(a)), bytes(sizeof a), elem_bytes(sizeof(T)) { begin(); }
  ~Local() { end(); }
  void begin();
  void end();
};
// The same array. clang does not report accesses of what it knows to be on the stack.
template <class T> EMU_RT EMU_INLINE T &observed(T &a) {
#ifdef __clang__
  T *p = &a;
  asm volatile("" : "+r"(p));
  return *p;
#else
  return a;
#endif
}
void defined(const void *p, size_t bytes);           // code that is not instrumented has written a thread's array
uint32_t smem_addr(const void *p);
char *smem_ptr(uint32_t a);

// ---- asynchronous copies -------------------------------------------------------------------------------------------
void cp_async(void *dst, const void *src, int bytes, int copied);
void cp_commit();
void cp_wait(int keep);
void mbar_init(void *bar, uint32_t count);
void mbar_arrive(void *bar, uint32_t expect_tx, bool arrive);
void mbar_cp_async_arrive(void *bar, bool noinc);
bool mbar_test(void *bar, uint32_t parity);
void mbar_wait(void *bar, uint32_t parity);
void bulk_load(void *dst, const void *src, uint32_t bytes, void *bar, unsigned multicast = 0);
void bulk_store(void *dst, const void *src, uint32_t bytes, bool add);
void tensor_load(const TensorMap &map, void *dst, void *bar, const int32_t *coords, unsigned multicast = 0);
void tensor_store(const TensorMap &map, const void *src, const int32_t *coords, bool add);
void store_commit();
void store_wait(int keep);
void mbar_arrive_remote(void *bar, int rank, uint32_t expect_tx);
void cluster_store(void *dst, const void *src, int rank, uint32_t bytes, void *bar);

int launch(Launch *l, void (*entry)(void **), void **args);
}  // namespace emu
#pragma GCC visibility pop

namespace emu {
template <class T, size_t N> EMU_RT inline T (&static_shared(const char *name))[N] {
  return *reinterpret_cast<T(*)[N]>(shared_buf(name, sizeof(T) * N, sizeof(T) * 8, 128));
}
// Unpacks void** by the kernel's own signature.
template <class... A, size_t... I> EMU_RT void call(void (*k)(A...), void **a, std::index_sequence<I...>) {
  k(*static_cast<std::remove_const_t<std::remove_reference_t<A>> *>(a[I])...);
}
template <class... A> EMU_RT void call(void (*k)(A...), void **a) { call(k, a, std::index_sequence_for<A...>{}); }
}  // namespace emu

#define EMU_EXPORT(KERNEL)                                                                                     \
  extern "C" __attribute__((visibility("default"))) EMU_RT int emu_launch_##KERNEL(emu::Launch *l, void **args) { \
    return emu::launch(l, [](void **a) EMU_RT { emu::call(&KERNEL, a); }, args);                               \
  }
