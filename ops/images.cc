// Pillow's arithmetic, compiled for several instruction sets: ops/images.py calls the functions of ``images_level``.
// No threads and no Paddle: forked loader workers call it. Built with -ffp-contract=off, as Pillow is for x86-64.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define INLINE static inline __attribute__((always_inline))

using std::vector;
typedef uint8_t Byte;
typedef __m256d Pixel;  // its values; the fourth is not used

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace v3 {
#define NAME(name) name##_v3
#include "images.h"
#undef NAME
}  // namespace v3
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
namespace v4 {
#define NAME(name) name##_v4
#include "images.h"
#undef NAME
}  // namespace v4
#pragma GCC pop_options

// The largest of them that this CPU has, or "".
extern "C" const char* images_level() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("x86-64-v4") ? "v4" : __builtin_cpu_supports("x86-64-v3") ? "v3" : "";
}
