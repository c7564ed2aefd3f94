/* One launch of a tile kernel: gathers the arguments, picks the variant, calls the driver.
 *
 * Called as launch(kernel, pointers..., sizes..., programs, stream), all words. Returns 0, the driver's error, or
 * minus the number of a variant that is needed and has not been built yet. Nothing is looked up or allocated here.
 */
#include <stdarg.h>
#include <stdint.h>

#define MOST_ARGUMENTS 1024 /* whoever calls cannot pass more */
#define MOST_PROGRAMS 0x7fffffff

typedef int (*driver_launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                             void **, void **);

typedef int (*driver_encode)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                             const uint32_t *, int, int, int, int);

/* The driver's own records for a launch with attributes. */
typedef struct {
  int id, padding;
  union {
    int flag;
    unsigned char space[64];
  } value;
} attribute_t;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  const attribute_t *attributes;
  unsigned count;
} launch_t;

typedef int (*driver_overlap)(const launch_t *, void *, void **, void **);

/* Variants: 0 is built first; 1 takes sizes of which the first expects multiples of 8 as they come; 2 also takes pointers
 * that are not on 16 bytes, and matrices that cannot be described. */
enum { EVEN, ANY_SIZES, ANY_POINTERS, VARIANTS };

#define MOST_MATRICES 16
#define STARTS_EARLY 6 /* the attribute: may be started while the kernel before it is ending */
#define INVALID_VALUE 1
#define WRONG_CONTEXT 201

typedef struct {
  int32_t pointer, type, swizzle, bytes; /* which argument; the driver's element type and swizzle; bytes of an element */
  int64_t shape[2];                      /* rows and columns; a row is as far from the next as it is long */
  uint32_t block[2];
} onepass_matrix_t;

typedef struct {
  driver_launch launch;
  void *function[VARIANTS]; /* the driver's; only the first is always there */
  uint32_t threads, shared[VARIANTS];
  int32_t pointers, sizes, matrices;
  uint64_t multiples; /* the sizes that the first variant expects to be multiples of 8, a bit for each */
  driver_encode encode;
  const onepass_matrix_t *matrix;
  driver_overlap overlap; /* for kernels that wait by themselves for the one before; missing for others */
} onepass_kernel_t;

typedef struct {
  _Alignas(64) unsigned char map[128];
  int32_t shape[2];
  int64_t strides[2];
} described_t;

/* A matrix as the driver describes it: contiguous dimension first, 128-byte lines into the chip's cache. */
static int describe(const onepass_kernel_t *kernel, int k, uint64_t address, described_t *out) {
  const onepass_matrix_t *m = &kernel->matrix[k];
  const uint64_t sizes[2] = {(uint64_t)m->shape[1], (uint64_t)m->shape[0]};
  const uint64_t pitch[1] = {(uint64_t)m->shape[1] * (uint64_t)m->bytes};
  const uint32_t block[2] = {m->block[1], m->block[0]}, steps[2] = {1, 1};
  out->shape[0] = (int32_t)m->shape[0], out->shape[1] = (int32_t)m->shape[1];
  out->strides[0] = m->shape[1], out->strides[1] = 1;
  return kernel->encode(out->map, m->type, 2, (void *)address, sizes, pitch, block, steps, 0, m->swizzle, 2, 0);
}

/* Puts all arguments in their places and tells which variant takes them, or that the context is wrong (minus 1). */
static int arrange(const onepass_kernel_t *kernel, uint64_t *values, described_t *described, void **arguments) {
  static uint64_t scratch[2] = {0, 0};
  uint64_t low = 0, uneven = 0;
  int count = kernel->pointers + kernel->sizes;
  for (int k = 0; k < count; ++k) {
    arguments[k] = &values[k];
    if (k < kernel->pointers)
      low |= values[k];
    else if (k - kernel->pointers < 64 && kernel->multiples >> (k - kernel->pointers) & 1)
      uneven |= values[k];
  }
  int variant = low & 15 ? ANY_POINTERS : uneven & 7 ? ANY_SIZES : EVEN;
  for (int k = 0; variant != ANY_POINTERS && k < kernel->matrices; ++k) {
    described_t *d = &described[k];
    const int error = describe(kernel, k, values[kernel->matrix[k].pointer], d);
    if (error == WRONG_CONTEXT) return -1;
    if (error) {
      variant = ANY_POINTERS; /* what the driver does not take is read without descriptors */
      count = kernel->pointers + kernel->sizes;
      break;
    }
    arguments[count++] = d->map;
    arguments[count++] = &d->shape[0], arguments[count++] = &d->shape[1];
    arguments[count++] = &d->strides[0], arguments[count++] = &d->strides[1];
  }
  arguments[count] = &scratch[0];
  arguments[count + 1] = &scratch[1];
  return variant;
}

int onepass_launch(const onepass_kernel_t *kernel, ...) {
  uint64_t values[MOST_ARGUMENTS];
  void *arguments[MOST_ARGUMENTS + 2 + 5 * MOST_MATRICES];
  described_t described[MOST_MATRICES];
  const int count = kernel->pointers + kernel->sizes;
  if (count > MOST_ARGUMENTS) return INVALID_VALUE;
  va_list list;
  va_start(list, kernel);
  for (int k = 0; k < count; ++k) values[k] = va_arg(list, uint64_t);
  const int64_t programs = va_arg(list, int64_t);
  void *stream = va_arg(list, void *);
  va_end(list);
  if (programs <= 0) return 0;
  if (programs > MOST_PROGRAMS) return INVALID_VALUE; /* more than a grid has: the driver would be given fewer */
  const int variant = arrange(kernel, values, described, arguments);
  if (variant < 0) return WRONG_CONTEXT;
  void *function = kernel->function[variant];
  if (!function) return -variant;
  const uint32_t shared = kernel->shared[variant];
  if (kernel->overlap) {
    const attribute_t early = {.id = STARTS_EARLY, .value.flag = 1};
    const launch_t launch = {
        {(unsigned)programs, 1, 1}, {kernel->threads, 1, 1}, shared, stream, &early, 1,
    };
    if (!kernel->overlap(&launch, function, arguments, 0)) return 0; /* older drivers may not know the attribute */
  }
  return kernel->launch(function, (unsigned)programs, 1, 1, kernel->threads, 1, 1, shared, stream, arguments, 0);
}

/* --- recorded programs: one launch of many kernels and copies, after those whose arguments changed are set anew --- */

/* The driver's own records of a kernel and of a copy in a graph. */
typedef struct {
  void *function;
  unsigned grid[3], block[3], shared;
  void **arguments, **extra;
  void *kernel, *context;
} kernel_node_t;

typedef struct {
  uint64_t x, y, z, level;
  int kind; /* of memory */
  const void *host;
  uint64_t device;
  void *array, *reserved;
  uint64_t pitch, height;
} copy_end_t;

typedef struct {
  copy_end_t source, target;
  uint64_t width, height, depth;
} copy_node_t;

typedef struct {
  int32_t word, slot;
} patch_t; /* this word of a node is what the caller gives in that slot */

typedef struct {
  const onepass_kernel_t *kernel; /* missing for a copy */
  void *node;
  uint64_t *words; /* a kernel's pointers and sizes; target and source of a copy */
  const patch_t *patch;
  int64_t programs;
  copy_node_t *copy;
  int32_t patches, stale; /* stale: the graph does not have these words yet */
} onepass_node_t;

typedef struct {
  void *graph, *context;
  int (*set_kernel)(void *, void *, const kernel_node_t *);
  int (*set_copy)(void *, void *, const copy_node_t *, void *);
  int (*launch)(void *, void *);
  onepass_node_t *node;
  int32_t nodes;
} onepass_recording_t;

static int set_kernel(const onepass_recording_t *recording, onepass_node_t *node) {
  void *arguments[MOST_ARGUMENTS + 2 + 5 * MOST_MATRICES];
  described_t described[MOST_MATRICES];
  const onepass_kernel_t *kernel = node->kernel;
  const int variant = arrange(kernel, node->words, described, arguments);
  if (variant < 0) return WRONG_CONTEXT;
  if (!kernel->function[variant]) return -variant;
  const kernel_node_t now = {
      kernel->function[variant], {(unsigned)node->programs, 1, 1}, {kernel->threads, 1, 1}, kernel->shared[variant],
      arguments, 0, 0, 0,
  };
  return recording->set_kernel(recording->graph, node->node, &now);
}

/* Returns 0, the driver's error, or minus (4 * node + variant) where a variant has not been built yet; nothing runs
 * then, and the call may be made again. */
int onepass_replay(onepass_recording_t *recording, const uint64_t *given, void *stream) {
  for (int n = 0; n < recording->nodes; ++n) {
    onepass_node_t *node = &recording->node[n];
    for (int k = 0; k < node->patches; ++k) {
      const patch_t *patch = &node->patch[k];
      if (node->words[patch->word] == given[patch->slot]) continue;
      node->words[patch->word] = given[patch->slot];
      node->stale = 1;
    }
    if (!node->stale) continue;
    int status;
    if (node->kernel) {
      status = set_kernel(recording, node);
      if (status < 0) return -(4 * n - status);
    } else {
      node->copy->target.device = node->words[0], node->copy->source.device = node->words[1];
      status = recording->set_copy(recording->graph, node->node, node->copy, recording->context);
    }
    if (status) return status;
    node->stale = 0;
  }
  return recording->launch(recording->graph, stream);
}
