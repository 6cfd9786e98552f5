/* A CUDA driver without a GPU: it keeps what it was asked to launch. Built by fake_driver.py. */
#include <stdint.h>
#include <string.h>

enum { NAMES = 64, LAUNCHES = 256, INVALID_CONTEXT = 201, NOT_FOUND = 500 };

typedef struct {
  uint32_t sizes[7];
  uint32_t padding;
  void *stream;
  const void *attributes;
  uint32_t num_attributes;
} Config;

typedef struct {
  char name[512];
  Config config;
  void **parameters;
} Launch;

typedef struct {
  int32_t kind, rank;
  uint64_t address, dims[5], strides[4];
  uint32_t box[5];
  int32_t options[4];
} Described; /* what the fake writes into a descriptor: 124 bytes */

static char names[NAMES][512];
static int num_names, num_loaded, shared_bytes;
static _Thread_local void *context;
Launch launches[LAUNCHES];
int num_launches, fail_with, num_contexts;

int cuInit(unsigned flags) { return flags != 0; }
int cuGetErrorName(int status, const char **name) { *name = "CUDA_ERROR_FAKE"; return status < 0; }
int cuGetErrorString(int status, const char **text) { *text = "it was asked to"; return status < 0; }
int cuCtxGetCurrent(void **found) { *found = context; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **found, int device) {
  *found = (void *)(uintptr_t)(device + 1);
  return 0;
}
int cuCtxSetCurrent(void *given) { context = given; ++num_contexts; return 0; }
int loaded(void) { return num_loaded; }
int dynamic_shared(void) { return shared_bytes; }

int cuLibraryLoadData(void **library, const char *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
  if (memcmp(code, "\x7f" "ELF", 4)) return NOT_FOUND;
  *library = (void *)code;
  ++num_loaded;
  return 0;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  if (num_names == NAMES) num_names = 0;
  strncpy(names[num_names], name, 511);
  *kernel = names[num_names++];
  return 0;
}
int cuKernelGetFunction(void **function, void *kernel) {
  if (!context) return INVALID_CONTEXT;
  *function = kernel;
  return 0;
}
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
  shared_bytes = value;
  return attribute != 8;
}
int cuTensorMapEncodeTiled(void *map, int kind, uint32_t rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  if ((uintptr_t)map % 64) return 1;
  Described *out = memset(map, 0, 128);
  out->kind = kind; out->rank = rank; out->address = (uintptr_t)address;
  for (uint32_t i = 0; i < rank; ++i) {
    if (steps[i] != 1) return 1;
    out->dims[i] = dims[i]; out->box[i] = box[i];
    if (i + 1 < rank) out->strides[i] = strides[i];
  }
  out->options[0] = interleave; out->options[1] = swizzle; out->options[2] = promotion; out->options[3] = fill;
  return 0;
}
int cuLaunchKernelEx(const Config *config, const char *function, void **parameters, void **extra) {
  if (!context) return INVALID_CONTEXT;
  if (fail_with) return fail_with;
  Launch *out = &launches[num_launches++ % LAUNCHES];
  strcpy(out->name, function);
  out->config = *config; out->parameters = parameters;
  return extra != 0;
}
