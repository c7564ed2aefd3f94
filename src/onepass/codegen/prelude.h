/* The scalar operations generated kernels are written in: eager's results, in code that vectorises.
 *
 * Everything is static inline and branch-free where it can be, so a loop under `#pragma omp simd`
 * stays a vector loop. Bools are uint8_t 0/1 (gcc does not vectorise loads of _Bool); float16 and
 * bfloat16 values are uint16_t bit patterns, computed on as float. Operations that can fail take an
 * `int *status` and set a bit of it; they never trap.
 */
#ifndef ONEPASS_PRELUDE_H
#define ONEPASS_PRELUDE_H

#include <stddef.h>
#include <stdint.h>

#define ONEPASS_DIVISION_BY_ZERO 1
#define ONEPASS_INDEX_OUT_OF_RANGE 2

#define OP static inline __attribute__((always_inline, unused))
#define OP_INFINITY __builtin_inff()
#define OP_NAN __builtin_nanf("")

/* Without OpenMP (clang, see the toolchain) a kernel runs on one thread. */
#ifdef _OPENMP
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);
extern int omp_get_max_threads(void);
#else
OP int omp_get_thread_num(void) { return 0; }
OP int omp_get_num_threads(void) { return 1; }
OP int omp_get_max_threads(void) { return 1; }
#endif

/* ---- libm, with the vector variants of glibc's libmvec ------------------------------------------
 * Measured on glibc 2.36, every function below is within 4 ulp for all inputs, specials included.
 * <math.h> is not included: it would declare these without the vector variants (they need -ffast-math
 * there) and costs parse time. ONEPASS_SCALAR_MATH turns the variants off. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) \
    && !defined(ONEPASS_SCALAR_MATH)
#if __GLIBC_PREREQ(2, 22)
#define OP_VECTOR_222 __attribute__((simd("notinbranch")))
#endif
#if __GLIBC_PREREQ(2, 35)
#define OP_VECTOR_235 __attribute__((simd("notinbranch")))
#endif
#endif
#ifndef OP_VECTOR_222
#define OP_VECTOR_222
#endif
#ifndef OP_VECTOR_235
#define OP_VECTOR_235
#endif

#define OP_LIBM1(name, vector)                                  \
  vector __attribute__((const)) extern double name(double);     \
  vector __attribute__((const)) extern float name##f(float);    \
  OP double op_##name##_f64(double x) { return name(x); }
#define OP_LIBM1_F32(name) OP float op_##name##_f32(float x) { return name##f(x); }
#define OP_LIBM2(name, vector)                                         \
  vector __attribute__((const)) extern double name(double, double);    \
  vector __attribute__((const)) extern float name##f(float, float);    \
  OP double op_##name##_f64(double x, double y) { return name(x, y); } \
  OP float op_##name##_f32(float x, float y) { return name##f(x, y); }

OP_LIBM1(exp, OP_VECTOR_222)
OP_LIBM1(erf, OP_VECTOR_235)
OP_LIBM1(log, OP_VECTOR_222) OP_LIBM1_F32(log)
OP_LIBM1(sin, OP_VECTOR_222) OP_LIBM1_F32(sin)
OP_LIBM1(cos, OP_VECTOR_222) OP_LIBM1_F32(cos)
OP_LIBM1(exp2, OP_VECTOR_235) OP_LIBM1_F32(exp2)
OP_LIBM1(expm1, OP_VECTOR_235) OP_LIBM1_F32(expm1)
OP_LIBM1(log2, OP_VECTOR_235) OP_LIBM1_F32(log2)
OP_LIBM1(log10, OP_VECTOR_235) OP_LIBM1_F32(log10)
OP_LIBM1(log1p, OP_VECTOR_235) OP_LIBM1_F32(log1p)
OP_LIBM1(tan, OP_VECTOR_235) OP_LIBM1_F32(tan)
OP_LIBM1(asin, OP_VECTOR_235) OP_LIBM1_F32(asin)
OP_LIBM1(acos, OP_VECTOR_235) OP_LIBM1_F32(acos)
OP_LIBM1(atan, OP_VECTOR_235) OP_LIBM1_F32(atan)
OP_LIBM1(sinh, OP_VECTOR_235) OP_LIBM1_F32(sinh)
OP_LIBM1(cosh, OP_VECTOR_235) OP_LIBM1_F32(cosh)
OP_LIBM1(tanh, OP_VECTOR_235) OP_LIBM1_F32(tanh)
OP_LIBM1(asinh, OP_VECTOR_235) OP_LIBM1_F32(asinh)
OP_LIBM1(acosh, OP_VECTOR_235) OP_LIBM1_F32(acosh)
OP_LIBM1(atanh, OP_VECTOR_235) OP_LIBM1_F32(atanh)
OP_LIBM1(erfc, OP_VECTOR_235) OP_LIBM1_F32(erfc)
OP_LIBM2(pow, OP_VECTOR_222)
OP_LIBM2(atan2, OP_VECTOR_235)
OP_LIBM2(hypot, OP_VECTOR_235)
extern double lgamma_r(double, int *);
extern float lgammaf_r(float, int *);
extern double fmod(double, double);
OP double op_lgamma_f64(double x) { int sign; return lgamma_r(x, &sign); }
OP float op_lgamma_f32(float x) { int sign; return lgammaf_r(x, &sign); }

/* ---- bit patterns ------------------------------------------------------------------------------ */
#define OP_BITCAST(name, from, to) \
  OP to op_bits_##name(from x) { to y; __builtin_memcpy(&y, &x, sizeof y); return y; }
OP_BITCAST(f32_i32, float, int32_t)
OP_BITCAST(f32_u32, float, uint32_t)
OP_BITCAST(i32_f32, int32_t, float)
OP_BITCAST(u32_f32, uint32_t, float)
OP_BITCAST(f64_i64, double, int64_t)
OP_BITCAST(i64_f64, int64_t, double)

/* ---- 16-bit floats ----------------------------------------------------------------------------- */
OP float op_widen_bf16(uint16_t h) { return op_bits_u32_f32((uint32_t)h << 16); }

/* Round to nearest even; a NaN becomes the NaN eager writes. */
OP uint16_t op_narrow_bf16(float x) {
  uint32_t bits = op_bits_f32_u32(x);
  uint32_t rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* gcc 12 has no vector code for _Float16 conversions, so: bits. Subnormals are the difference of two
 * normal floats; a multiplication would be shorter but takes a slow path on subnormal operands. */
OP float op_widen_f16(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
  uint32_t subnormal = op_bits_f32_u32(op_bits_u32_f32(magnitude + 0x38800000u) - 0x1p-14f);
  uint32_t bits = magnitude < 0x00800000u ? subnormal : magnitude + 0x38000000u;
  bits = magnitude >= 0x0f800000u ? magnitude + 0x70000000u : bits;
  return op_bits_u32_f32(bits | ((uint32_t)(h & 0x8000u) << 16));
}

/* Normal results round by adding half an ulp in the bits; subnormal ones by an addition whose ulp is
 * float16's smallest step. */
OP uint16_t op_narrow_f16(float x) {
  uint32_t bits = op_bits_f32_u32(x);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t subnormal = op_bits_f32_u32(op_bits_u32_f32(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  return (uint16_t)(result | sign);
}

/* ---- float arithmetic and comparison ----------------------------------------------------------- */
#define OP_FLOAT(T, U, t, f, u, BITS)                                                             \
  OP T op_abs_##t(T x) { return __builtin_fabs##f(x); }                                           \
  OP T op_sqrt_##t(T x) { return __builtin_sqrt##f(x); }                                          \
  OP T op_rsqrt_##t(T x) { return (T)1 / __builtin_sqrt##f(x); }                                  \
  OP T op_floor_##t(T x) { return __builtin_floor##f(x); }                                        \
  OP T op_ceil_##t(T x) { return __builtin_ceil##f(x); }                                          \
  OP T op_trunc_##t(T x) { return __builtin_trunc##f(x); }                                        \
  OP T op_round_##t(T x) { return __builtin_rint##f(x); }                                         \
  OP T op_copysign_##t(T x, T y) { return __builtin_copysign##f(x, y); }                          \
  OP T op_fma_##t(T x, T y, T z) { return __builtin_fma##f(x, y, z); }                            \
  OP T op_sign_##t(T x) { return (T)((x > 0) - (x < 0)); }                                        \
  /* In two steps: a chain of selections on two conditions each is three times slower. */          \
  OP T op_maximum_##t(T x, T y) { T m = x < y ? y : x; return y != y ? y : m; }                   \
  OP T op_minimum_##t(T x, T y) { T m = y < x ? y : x; return y != y ? y : m; }                   \
  OP T op_fmax_##t(T x, T y) { T m = x < y ? y : x; return x != x ? y : m; }                      \
  OP T op_fmin_##t(T x, T y) { T m = y < x ? y : x; return x != x ? y : m; }                      \
  OP uint8_t op_isnan_##t(T x) { return x != x; }                                                 \
  OP uint8_t op_isinf_##t(T x) { return __builtin_fabs##f(x) == (T)OP_INFINITY; }                 \
  OP uint8_t op_signbit_##t(T x) { return op_bits_##t##_##u(x) < 0; }                             \
  OP T op_truncdiv_##t(T x, T y) { return __builtin_trunc##f(x / y); }                            \
  /* One step in the order of bit patterns, which is the order of values on each side of zero. */ \
  OP T op_nextafter_##t(T x, T y) {                                                               \
    U bits = op_bits_##t##_##u(x);                                                                \
    U away = (y > x) == (x > 0) ? 1 : -1;                                                         \
    U tiny = y > 0 ? 1 : (U)((U)1 << (BITS - 2)) * -2 + 1;                                        \
    U next = x == 0 ? tiny : (U)(bits + away);                                                    \
    T moved = op_bits_##u##_##t(next);                                                            \
    T equal = x == y ? y : moved;                                                                 \
    return (x != x) | (y != y) ? x + y : equal;                                                   \
  }                                                                                               \
  OP T op_remainder_##t(T x, T y) {                                                               \
    T rest = op_fmod_##t(x, y);                                                                   \
    return (rest != 0) & ((y < 0) != (rest < 0)) ? rest + y : rest;                               \
  }                                                                                               \
  /* As c10::div_floor_floating: exact also where x / y rounds up to an integer. */               \
  OP T op_floordiv_##t(T x, T y) {                                                                \
    T rest = op_fmod_##t(x, y);                                                                   \
    T quotient = (x - rest) / y;                                                                  \
    quotient = (rest != 0) & ((y < 0) != (rest < 0)) ? quotient - 1 : quotient;                   \
    T whole = __builtin_floor##f(quotient);                                                       \
    whole = quotient - whole > (T)0.5 ? whole + 1 : whole;                                        \
    T zero = __builtin_copysign##f((T)0, x / y);                                                  \
    whole = quotient != 0 ? whole : zero;                                                         \
    return y == 0 ? x / y : whole;                                                                \
  }

OP double op_fmod_f64(double x, double y) { return fmod(x, y); }

/* fmod of floats, exact, in double: each step takes off a multiple of y and more than 2^48 of the
 * quotient, and floats' quotients are below 2^278; then the sign of x is restored. */
OP float op_fmod_f32(float x, float y) {
  double divisor = __builtin_fabs((double)y), inverse = 1.0 / divisor, rest = __builtin_fabs((double)x);
#pragma GCC unroll 6
  for (int step = 0; step < 6; step++)
    rest = __builtin_fma(-__builtin_trunc(rest * inverse), divisor, rest);
  rest = rest < 0 ? rest + divisor : rest;
  rest = rest >= divisor ? rest - divisor : rest;
  float result = __builtin_copysignf((float)rest, x);
  result = __builtin_fabsf(y) == OP_INFINITY ? x : result;
  return (y == 0) | (x - x != 0) | (y != y) ? OP_NAN : result;
}

OP_FLOAT(float, int32_t, f32, f, i32, 32)
OP_FLOAT(double, int64_t, f64, , i64, 64)

/* ---- float functions with their own code: faster than a call, and nothing is spilled around it ---- */

/* e^x: x = n ln 2 + r, a degree-6 polynomial in r, and 2^n in two factors so that subnormal results
 * round once. Within 1 ulp. */
OP float op_exp_f32(float x) {
  float bounded = x > 104.0f ? 104.0f : x;
  bounded = x < -104.0f ? -104.0f : bounded;
  float shifted = __builtin_fmaf(bounded, 0x1.715476p+0f, 0x1.8p23f);
  int32_t n = op_bits_f32_i32(shifted) - 0x4b400000;
  float whole = shifted - 0x1.8p23f;
  float r = __builtin_fmaf(whole, -0x1.62e4p-1f, bounded);
  r = __builtin_fmaf(whole, -0x1.7f7d1cp-20f, r);
  float p = __builtin_fmaf(0x1.6a25cap-10f, r, 0x1.1239d4p-7f);
  p = __builtin_fmaf(p, r, 0x1.5558eep-5f);
  p = __builtin_fmaf(p, r, 0x1.555492p-3f);
  p = __builtin_fmaf(p, r, 0x1.fffffcp-2f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  int32_t half = n >> 1;
  float first = op_bits_i32_f32((int32_t)((uint32_t)(half + 127) << 23));
  float second = op_bits_i32_f32((int32_t)((uint32_t)(n - half + 127) << 23));
  return p * first * second;
}

/* erf(x): x + x P(x^2) below 1, 1 - 2^-Q(|x|) above; both polynomials of degree 6, so one Horner
 * chain with selected coefficients. */
OP float op_erf_f32(float x) {
  float a = __builtin_fabsf(x);
  int large = a > 1.0f;
  a = a > 4.0f ? 4.0f : a;
  float t = large ? a : a * a;
  float p = large ? 0x1.19f320p-12f : 0x1.496a30p-14f;
  p = __builtin_fmaf(p, t, large ? -0x1.16b24cp-8f : -0x1.a3f700p-11f);
  p = __builtin_fmaf(p, t, large ? 0x1.021828p-5f : 0x1.5405b2p-8f);
  p = __builtin_fmaf(p, t, large ? -0x1.30a4acp-3f : -0x1.b7f90cp-6f);
  p = __builtin_fmaf(p, t, large ? -0x1.d75f3ap-1f : 0x1.ce2cf8p-4f);
  p = __builtin_fmaf(p, t, large ? -0x1.a0448cp+0f : -0x1.81273ep-2f);
  p = __builtin_fmaf(p, t, large ? -0x1.02532ap-11f : 0x1.06eba8p-3f);
  float small_result = __builtin_fmaf(p, a, a);
  float shifted = p + 0x1.8p23f;
  float r = p - (shifted - 0x1.8p23f);
  float q = __builtin_fmaf(0x1.5c08e6p-10f, r, 0x1.3d0c52p-7f);
  q = __builtin_fmaf(q, r, 0x1.c6b6e4p-5f);
  q = __builtin_fmaf(q, r, 0x1.ebf918p-3f);
  q = __builtin_fmaf(q, r, 0x1.62e428p-1f);
  q = __builtin_fmaf(q, r, 1.0f);
  uint32_t power = op_bits_f32_u32(q) + (op_bits_f32_u32(shifted) << 23);
  float result = large ? 1.0f - op_bits_u32_f32(power) : small_result;
  return __builtin_copysignf(result, x);
}

/* The normal distribution where the result is rounded to 16 bits. */
OP float op_tanh_16_f32(float x) { return op_tanh_f32(x); }
OP float op_normal_16_f32(float x) { return 0.5f * (1.0f + op_erf_f32(x * 0x1.6a09e6p-1f)); }

/* The inverse of erf: eager's rational start and two of Halley's steps, the tail's on erfc, where
 * erf itself has no digits left. */
#define OP_ERFINV(T, t, f)                                                                               \
  OP T op_erfinv_step_##t(T x, T a) {                                                                    \
    T inner = op_erf_##t(x) - a, outer = (1 - a) - op_erfc_##t(x);                                       \
    T step = (a <= (T)0.7 ? inner : outer) / ((T)1.1283791670955126 * op_exp_##t(-x * x));               \
    return x - step / (1 + x * step);                                                                    \
  }                                                                                                      \
  OP T op_erfinv_##t(T y) {                                                                              \
    T a = __builtin_fabs##f(y), z = y * y;                                                               \
    T inner = a * ((((T)-0.140543331 * z + (T)0.914624893) * z + (T)-1.645349621) * z + (T)0.886226899)  \
      / (((((T)0.012229801 * z + (T)-0.329097515) * z + (T)1.442710462) * z + (T)-2.118377725) * z + 1); \
    T w = __builtin_sqrt##f(-op_log_##t((1 - a) / 2));                                                   \
    T outer = ((((T)1.641345311 * w + (T)3.429567803) * w + (T)-1.624906493) * w + (T)-1.970840454)      \
      / (((T)1.637067800 * w + (T)3.543889200) * w + 1);                                                 \
    T x = op_erfinv_step_##t(op_erfinv_step_##t(a <= (T)0.7 ? inner : outer, a), a);                     \
    x = a == 1 ? (T)OP_INFINITY : x;                                                                     \
    return __builtin_copysign##f(a <= 1 ? x : (T)OP_NAN, y);                                             \
  }
OP_ERFINV(float, f32, f)
OP_ERFINV(double, f64, )

/* nextafter of 16-bit floats: one step in their own bit patterns. */
#define OP_NEXTAFTER_HALF(t, INFINITY_BITS)                                          \
  OP uint16_t op_nextafter_##t(uint16_t x, uint16_t y) {                             \
    float a = op_widen_##t(x), b = op_widen_##t(y);                                  \
    uint16_t step = (uint16_t)((b > a) == (a > 0) ? x + 1 : x - 1);                  \
    uint16_t tiny = (uint16_t)(b > 0 ? 1 : 0x8001);                                  \
    uint16_t moved = a == 0 ? tiny : step;                                           \
    uint16_t equal = a == b ? y : moved;                                             \
    return (a != a) | (b != b) ? (uint16_t)(INFINITY_BITS | 0x7fff) : equal;         \
  }
OP_NEXTAFTER_HALF(bf16, 0x7f80)
OP_NEXTAFTER_HALF(f16, 0x7c00)

/* ---- integers: they wrap around ---------------------------------------------------------------- */
#define OP_INTEGER(T, U, t, BITS)                                                                \
  OP T op_add_##t(T x, T y) { return (T)((U)x + (U)y); }                                         \
  OP T op_sub_##t(T x, T y) { return (T)((U)x - (U)y); }                                         \
  OP T op_mul_##t(T x, T y) { return (T)((U)x * (U)y); }                                         \
  OP T op_neg_##t(T x) { return (T)((U)0 - (U)x); }                                              \
  OP T op_sign_##t(T x) { return (T)((x > 0) - (x < 0)); }                                       \
  OP T op_abs_##t(T x) { return x < 0 ? op_neg_##t(x) : x; }                                     \
  OP T op_maximum_##t(T x, T y) { return x > y ? x : y; }                                        \
  OP T op_minimum_##t(T x, T y) { return x < y ? x : y; }                                        \
  /* Counts out of range: a left shift gives 0, a right shift what is left after all bits. */    \
  OP T op_shl_##t(T x, T y) { return (U)y < BITS ? (T)((U)x << ((U)y & (BITS - 1))) : 0; }       \
  OP T op_shr_##t(T x, T y) {                                                                    \
    T all = x < 0 ? (T)-1 : 0;                                                                   \
    return (U)y < BITS ? (T)(x >> ((U)y & (BITS - 1))) : all;                                    \
  }                                                                                              \
  OP T op_pow_##t(T base, T exponent) {                                                          \
    U result = 1, square = (U)base;                                                              \
    for (U left = exponent < 0 ? 0 : (U)exponent; left; left >>= 1, square = (U)(square * square)) \
      result = left & 1 ? (U)(result * square) : result;                                         \
    T inverse = base == 1 ? 1 : base == (T)-1 ? (exponent & 1 ? (T)-1 : 1) : 0;                  \
    return exponent < 0 ? inverse : (T)result;                                                   \
  }
OP_INTEGER(int64_t, uint64_t, i64, 64)
OP_INTEGER(int32_t, uint32_t, i32, 32)
OP_INTEGER(int16_t, uint32_t, i16, 16)
OP_INTEGER(int8_t, uint32_t, i8, 8)
OP_INTEGER(uint8_t, uint32_t, u8, 8)
OP_INTEGER(uint32_t, uint32_t, u32, 32)

/* Quotients: OP_QUOTIENT's x / y rounds to zero. Types up to 32 bits divide in double, which is exact
 * and vectorises; a zero divisor sets the status, -1 is negation (the one case that overflows). */
#define OP_QUOTIENT_DOUBLE(T, x, y) ((T)((double)(x) / (double)(y)))
#define OP_QUOTIENT_NATIVE(T, x, y) ((x) / (y))
#define OP_DIVISION(T, t, QUOTIENT)                                                 \
  OP T op_truncdiv_##t(T x, T y, int *status) {                                     \
    *status |= y == 0 ? ONEPASS_DIVISION_BY_ZERO : 0;                               \
    T divisor = (y == 0) | (y == -1) ? 1 : y;                                       \
    T quotient = QUOTIENT(T, x, divisor);                                           \
    return y == -1 ? op_neg_##t(x) : quotient;                                      \
  }                                                                                 \
  OP T op_fmod_##t(T x, T y, int *status) {                                         \
    T quotient = op_truncdiv_##t(x, y, status);                                     \
    return op_sub_##t(x, op_mul_##t(quotient, y));                                  \
  }                                                                                 \
  OP T op_floordiv_##t(T x, T y, int *status) {                                     \
    T quotient = op_truncdiv_##t(x, y, status);                                     \
    T rest = op_sub_##t(x, op_mul_##t(quotient, y));                                \
    return op_sub_##t(quotient, (rest != 0) & ((rest < 0) != (y < 0)));             \
  }                                                                                 \
  OP T op_remainder_##t(T x, T y, int *status) {                                    \
    T rest = op_fmod_##t(x, y, status);                                             \
    return op_add_##t(rest, (rest != 0) & ((rest < 0) != (y < 0)) ? y : 0);         \
  }
OP_DIVISION(int64_t, i64, OP_QUOTIENT_NATIVE)
OP_DIVISION(int32_t, i32, OP_QUOTIENT_DOUBLE)
OP_DIVISION(int16_t, i16, OP_QUOTIENT_DOUBLE)
OP_DIVISION(int8_t, i8, OP_QUOTIENT_DOUBLE)
OP_DIVISION(uint8_t, u8, OP_QUOTIENT_DOUBLE)

/* A checked index; out of range sets the status and reads element 0. */
OP int64_t op_check_index(int64_t index, int64_t size, int *status) {
  int bad = (uint64_t)index >= (uint64_t)size;
  *status |= bad ? ONEPASS_INDEX_OUT_OF_RANGE : 0;
  return bad ? 0 : index;
}
OP int64_t op_wrap_index(int64_t index, int64_t size, int *status) {
  return op_check_index(index < 0 ? index + size : index, size, status);
}

/* ---- casts: a float out of the integer's range gives what x86 gives ---------------------------- */
OP int64_t op_cast_f32_i64(float x) {
  return (int64_t)((x >= -0x1p63f) & (x < 0x1p63f) ? x : -0x1p63f);
}
OP int64_t op_cast_f64_i64(double x) {
  return (int64_t)((x >= -0x1p63) & (x < 0x1p63) ? x : -0x1p63);
}
OP int32_t op_cast_f32_i32(float x) {
  return (int32_t)((x >= -0x1p31f) & (x < 0x1p31f) ? x : -0x1p31f);
}
OP int32_t op_cast_f64_i32(double x) {
  return (int32_t)((x > -0x1.00000002p31) & (x < 0x1p31) ? x : -0x1p31);
}

/* ---- reductions: one new element into a state, and one state into another ---------------------- */
#define OP_WELFORD(T, t)                                                                          \
  OP void op_welford_scaled_##t(T *mean, T *m2, T *count, T x, T reciprocal) {                    \
    T delta = x - *mean;                                                                          \
    T moved = *mean + delta * reciprocal;                                                         \
    *m2 += delta * (x - moved);                                                                   \
    *mean = moved;                                                                                \
    *count += 1;                                                                                  \
  }                                                                                               \
  OP void op_welford_##t(T *mean, T *m2, T *count, T x) {                                         \
    op_welford_scaled_##t(mean, m2, count, x, (T)1 / (*count + 1));                               \
  }                                                                                               \
  /* Chan's rule; an empty state changes nothing. */                                              \
  OP void op_welford_merge_##t(T *mean, T *m2, T *count, T mean_b, T m2_b, T count_b) {           \
    T total = *count + count_b;                                                                   \
    T delta = mean_b - *mean;                                                                     \
    T share = count_b == 0 ? (T)0 : count_b / total;                                              \
    *m2 += m2_b + (count_b == 0 ? (T)0 : delta * delta * (*count * share));                       \
    *mean = *count == 0 ? mean_b : *mean + delta * share;                                         \
    *count = total;                                                                               \
  }
/* One more element of a sum of exponentials, divided by that of its maximum. */
#define OP_LOGSUMEXP(T, t)                                                                        \
  OP void op_logsumexp_##t(T *top, T *total, T x) {                                               \
    T most = op_maximum_##t(x, *top);                                                             \
    T old = *top == most ? (T)1 : op_exp_##t(*top - most);                                        \
    *total = *total * old + (x == most ? (T)1 : op_exp_##t(x - most));                            \
    *top = most;                                                                                  \
  }
OP_LOGSUMEXP(float, f32)
OP_LOGSUMEXP(double, f64)

OP_WELFORD(float, f32)
OP_WELFORD(double, f64)

/* The same state as sums of d = x - origin and d * d, where the origin is one of the elements. */
OP void op_moments(double *sum, double *squares, double d) {
  *sum += d;
#ifdef __FP_FAST_FMA
  *squares = __builtin_fma(d, d, *squares);
#else
  *squares += d * d;
#endif
}
/* As eager's, NaN where an element is infinite. */
OP double op_moments_mean(double origin, double sum, double count) {
  return count == 0 ? 0 : origin + sum / count + (sum - sum);
}
OP double op_moments_m2(double sum, double squares, double count) {
  double m2 = count == 0 ? 0 : squares - sum * (sum / count);
  return m2 < 0 ? 0 : m2;
}

/* Eager's order: NaN before everything, then the extreme, ties to the lower index. */
#define OP_ARG(T, t, name, BEFORE)                                                              \
  OP void op_##name##_##t(T *value, int64_t *index, T x, int64_t at) {                          \
    T best = *value;                                                                            \
    int equal = (x == best) | ((x != x) & (best != best));                                      \
    int wins = (x BEFORE best) | ((x != x) & (best == best)) | (equal & (at < *index));         \
    *value = wins ? x : best;                                                                   \
    *index = wins ? at : *index;                                                                \
  }
#define OP_ARGS(T, t) OP_ARG(T, t, argmax, >) OP_ARG(T, t, argmin, <)
OP_ARGS(float, f32)
OP_ARGS(double, f64)
OP_ARGS(int64_t, i64)
OP_ARGS(int32_t, i32)
OP_ARGS(int16_t, i16)
OP_ARGS(int8_t, i8)
OP_ARGS(uint8_t, u8)

/* ---- random numbers: Philox4x32-10 -------------------------------------------------------------
 * One generator over 8 counters at a time, words in 64-bit lanes: vpmuludq is then the whole product. */
typedef uint64_t op_u64x8 __attribute__((vector_size(64)));
#ifdef __clang__
#define OP_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else /* gcc has that spelling only since version 12 */
#define OP_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (op_u64x8){__VA_ARGS__})
#endif

OP op_u64x8 op_product_of_words(op_u64x8 x, uint64_t word) {
#if defined(__AVX512F__) && !defined(__clang__)
  typedef int op_i32x16 __attribute__((vector_size(64)));
  typedef long long op_i64x8 __attribute__((vector_size(64)));
  op_u64x8 y = word - (op_u64x8){0};
  return (op_u64x8)__builtin_ia32_pmuludq512_mask((op_i32x16)x, (op_i32x16)y, (op_i64x8){0}, (unsigned char)-1);
#else
  return (x & 0xffffffffu) * word;
#endif
}

/* The four words of counters first .. first + 7, in order. */
OP void op_random32(uint64_t seed, uint32_t stream, uint64_t first, uint32_t out[32]) {
  uint64_t key0 = (uint32_t)seed, key1 = seed >> 32;
  op_u64x8 counter = first + (op_u64x8){0, 1, 2, 3, 4, 5, 6, 7};
  op_u64x8 a = counter, b = counter >> 32, c = stream - (op_u64x8){0}, d = {0};
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    op_u64x8 left = op_product_of_words(a, 0xD2511F53u), right = op_product_of_words(c, 0xCD9E8D57u);
    a = (right >> 32) ^ b ^ key0;
    c = (left >> 32) ^ d ^ key1;
    b = right;
    d = left;
    key0 = (uint32_t)(key0 + 0x9E3779B9u);
    key1 = (uint32_t)(key1 + 0xBB67AE85u);
  }
  op_u64x8 low = (a & 0xffffffffu) | (b << 32), high = (c & 0xffffffffu) | (d << 32);
  op_u64x8 words[2] = {
    OP_SHUFFLE(low, high, 0, 8, 1, 9, 2, 10, 3, 11),
    OP_SHUFFLE(low, high, 4, 12, 5, 13, 6, 14, 7, 15),
  };
  __builtin_memcpy(out, words, sizeof words);
}

/* The words of elements first .. first + count - 1 (element i has lane i mod 4 of counter i div 4). */
OP void op_random_fill(uint64_t seed, uint32_t stream, uint64_t first, uint32_t *out, int64_t count) {
  uint32_t words[32];
  int64_t skip = (int64_t)(first & 3);
  for (int64_t at = -skip; at < count; at += 32) {
    op_random32(seed, stream, (first + (uint64_t)at) >> 2, words);
    if (at >= 0 && at + 32 <= count)
      __builtin_memcpy(out + at, words, sizeof words);
    else
      for (int64_t i = at < 0 ? -at : 0; i < 32 && at + i < count; i++) out[at + i] = words[i];
  }
}

OP void op_random4(uint64_t seed, uint32_t stream, uint64_t counter, uint32_t out[4]) {
  uint64_t key0 = (uint32_t)seed, key1 = seed >> 32;
  uint64_t a = (uint32_t)counter, b = counter >> 32, c = stream, d = 0;
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    uint64_t left = a * 0xD2511F53u, right = c * 0xCD9E8D57u;
    a = ((right >> 32) ^ b ^ key0) & 0xffffffffu;
    c = ((left >> 32) ^ d ^ key1) & 0xffffffffu;
    b = right & 0xffffffffu;
    d = left & 0xffffffffu;
    key0 = (uint32_t)(key0 + 0x9E3779B9u);
    key1 = (uint32_t)(key1 + 0xBB67AE85u);
  }
  out[0] = (uint32_t)a, out[1] = (uint32_t)b, out[2] = (uint32_t)c, out[3] = (uint32_t)d;
}
/* One element's word, where indices do not run in order. */
OP uint32_t op_random(uint64_t seed, uint32_t stream, uint64_t index) {
  uint32_t words[4];
  op_random4(seed, stream, index >> 2, words);
  uint32_t low = index & 1 ? words[1] : words[0], high = index & 1 ? words[3] : words[2];
  return index & 2 ? high : low;
}
OP float op_uniform_f32(uint32_t word) { return (float)(int32_t)(word >> 8) * 0x1p-24f; }
OP double op_uniform_f64(uint32_t word) { return (double)word * 0x1p-32; }

/* ---- index arithmetic of generated loops: divisors are positive ---- */
OP int64_t op_index_min(int64_t a, int64_t b) { return a < b ? a : b; }
/* Which of several kernels a program is one of: the last whose first program is not after it. */
OP int64_t op_part(const int64_t *firsts, int64_t count, int64_t program) {
  int64_t low = 0;
  while (count > 1) {
    const int64_t half = count / 2;
    if (firsts[low + half] <= program) low += half;
    count -= half;
  }
  return low;
}
OP int64_t op_index_floordiv(int64_t a, int64_t b) { return a / b - ((a % b) < 0); }
OP int64_t op_index_remainder(int64_t a, int64_t b) { const int64_t r = a % b; return r < 0 ? r + b : r; }

/* sum += x; what the rounding of that addition lost goes to *lost (Knuth's two-sum; exact for finite values). */
#define OP_LOSSLESS(T, t)                                                          \
  OP void op_add_lossless_##t(T *sum, T *lost, T x) {                              \
    const T total = *sum + x, back = total - *sum;                                 \
    *lost += (*sum - (total - back)) + (x - back);                                 \
    *sum = total;                                                                  \
  }                                                                                \
  OP T op_give_back_##t(T sum, T lost) { return lost - lost == 0 ? sum + lost : sum; }
OP_LOSSLESS(float, f32)
OP_LOSSLESS(double, f64)

/* Write `bytes` (a multiple of 64) past the caches where the place is a line's start, else as usual.
   Builtins, because <immintrin.h> would double the time every kernel takes to compile. */
#if defined(__clang__)
typedef long long op_words __attribute__((vector_size(64)));
#define OP_STREAM(to, words) __builtin_nontemporal_store(words, (op_words *)(to))
#elif defined(__AVX512F__)
typedef long long op_words __attribute__((vector_size(64)));
#define OP_STREAM(to, words) __builtin_ia32_movntdq512((op_words *)(to), words)
#elif defined(__AVX__)
typedef long long op_words __attribute__((vector_size(32)));
#define OP_STREAM(to, words) __builtin_ia32_movntdq256((op_words *)(to), words)
#elif defined(__x86_64__)
typedef long long op_words __attribute__((vector_size(16)));
#define OP_STREAM(to, words) __builtin_ia32_movntdq((op_words *)(to), words)
#endif
#if defined(__x86_64__)
OP void op_stream(void *to, const void *from, int64_t bytes, int touched) {
  if (!touched || ((uintptr_t)to & 63) != 0) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  for (int64_t at = 0; at < bytes; at += (int64_t)sizeof(op_words))
    OP_STREAM((char *)to + at, *(const op_words *)((const char *)from + at));
}
OP void op_stream_end(void) { __builtin_ia32_sfence(); }
#else
OP void op_stream(void *to, const void *from, int64_t bytes, int touched) { __builtin_memcpy(to, from, bytes); }
OP void op_stream_end(void) {}
#endif

/* Whether a large buffer's pages exist. A page that does not is cleared by the kernel at its first store, in cache,
 * and passing the cache then only costs. The first page is malloc's; one a mebibyte on tells. */
#if defined(__linux__) && defined(__x86_64__)
extern int mincore(void *address, size_t length, unsigned char *resident);
OP int op_touched(const void *buffer) {
  unsigned char resident = 1;
  if (mincore((void *)(((uintptr_t)buffer + (1 << 20)) & ~(uintptr_t)4095), 1, &resident) != 0) return 1;
  return resident & 1;
}
#else
OP int op_touched(const void *buffer) { return 1; }
#endif

#endif
