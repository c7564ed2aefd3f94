/* One launch of a tile kernel: gathers the arguments, picks the variant, calls the driver.
 *
 * Called as launch(kernel, pointers..., sizes..., programs, stream), all words. Returns 0, the driver's error, or
 * -1 where a pointer is not on 16 bytes and the variant for that has not been built yet. Nothing is looked up or
 * allocated here.
 */
#include <stdarg.h>
#include <stdint.h>

#define MOST_ARGUMENTS 256

typedef int (*driver_launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                             void **, void **);

typedef struct {
  driver_launch launch;
  void *aligned, *general; /* the driver's functions; general may be missing */
  uint32_t threads, shared, general_shared;
  int32_t pointers, sizes;
} onepass_kernel_t;

int onepass_launch(const onepass_kernel_t *kernel, ...) {
  uint64_t values[MOST_ARGUMENTS], scratch[2] = {0, 0}, low = 0;
  void *arguments[MOST_ARGUMENTS + 2];
  const int count = kernel->pointers + kernel->sizes;
  va_list list;
  va_start(list, kernel);
  for (int k = 0; k < count; ++k) {
    values[k] = va_arg(list, uint64_t);
    arguments[k] = &values[k];
    low |= k < kernel->pointers ? values[k] : 0;
  }
  const int64_t programs = va_arg(list, int64_t);
  void *stream = va_arg(list, void *);
  va_end(list);
  if (programs <= 0) return 0;
  arguments[count] = &scratch[0];
  arguments[count + 1] = &scratch[1];
  const int general = (low & 15) != 0;
  void *function = general ? kernel->general : kernel->aligned;
  if (!function) return -1;
  return kernel->launch(function, (unsigned)programs, 1, 1, kernel->threads, 1, 1,
                        general ? kernel->general_shared : kernel->shared, stream, arguments, 0);
}
