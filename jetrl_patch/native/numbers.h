/* Vectors, and conversions of BF16 and e4m3fn, for all C sources here.
 *
 * The sources are compiled once for each instruction set (build.py). `vf` and `vi` are the widest vectors of the set, with WIDTH
 * lanes. A sum over lanes always has LANES of them, so every set adds in the same order; the type `lanes` holds LANES values in as
 * many vectors as the set needs. A multiply-add that rounds once is written `fma_v`. The compiler fuses nothing else
 * (-ffp-contract=off), so the bits are the same with every compiler and set. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDTH 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define LANES 16
#define PARTS (LANES / WIDTH)
#define GROUP 128 /* the largest group */

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(WIDTH * 2), aligned(2), may_alias));

static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

static inline float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

/* a * b + c, rounded once */
#if defined(__AVX512F__)
INLINE vf fma_v(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif WIDTH == 8
INLINE vf fma_v(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__)
INLINE vf fma_v(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else  /* no such instruction: the C library's fmaf, lane by lane */
INLINE vf fma_v(vf a, vf b, vf c) {
    for (int i = 0; i < WIDTH; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

INLINE vf all(float x) { return x - (vf){0}; }  /* not +: -0.0f stays */
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

typedef struct { vf part[PARTS]; } lanes;  /* LANES values */

INLINE float lane_sum(lanes a) {  /* a fixed summation tree: lane i and i + 8, then i and i + 4, i and i + 2, i and i + 1 */
    typedef float v4 __attribute__((vector_size(16)));
#if WIDTH == 16
    const __m256 t = _mm256_add_ps(_mm512_castps512_ps256((__m512)a.part[0]), _mm512_extractf32x8_ps((__m512)a.part[0], 1));
    const v4 u = (v4)_mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
#elif WIDTH == 8
    const __m256 t = (__m256)(a.part[0] + a.part[1]);
    const v4 u = (v4)_mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
#else
    const v4 u = (a.part[0] + a.part[2]) + (a.part[1] + a.part[3]);
#endif
    return (u[0] + u[2]) + (u[1] + u[3]);
}

INLINE vf exp_v(vf x) {  /* FP32 exp, accurate to about 1 ulp: 0 below -87.3, inf above 88, NaN for NaN */
    const vi low = x < -87.3f, high = x > 88.0f, nan = x != x;
    const vf c = pick(high, all(88.0f), pick(low, all(-87.3f), x));
    const vf magic = all(12582912.0f);  /* 1.5 * 2^23: adding it rounds to an integer */
    const vf n = fma_v(c, all(1.44269504088896341f), magic) - magic;
    const vf r = fma_v(n, all(2.12194440e-4f), fma_v(n, all(-0.693359375f), c));
    vf p = all(1.9875691500e-4f);
    p = fma_v(p, r, all(1.3981999507e-3f));
    p = fma_v(p, r, all(8.3334519073e-3f));
    p = fma_v(p, r, all(4.1665795894e-2f));
    p = fma_v(p, r, all(1.6666665459e-1f));
    p = fma_v(p, r, all(5.0000001201e-1f));
    p = fma_v(p, r * r, r) + 1.0f;
    const vf y = p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    return pick(nan, x, pick(high, all(INFINITY), pick(low, (vf){0}, y)));
}

/* ---- BF16 --------------------------------------------------------------------------------- */

static inline float from_bf16(uint16_t x) { return as_float((uint32_t)x << 16); }

static inline uint16_t to_bf16(float f) {  /* round to nearest even; NaN stays NaN */
    uint32_t b = as_bits(f);
    uint32_t r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return (b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)r;
}

INLINE vf widen_bf16(vh x) { return (vf)(__builtin_convertvector(x, vi) << 16); }

INLINE vf load_bf16(const uint16_t *x) {
    vh h;
    memcpy(&h, x, sizeof h);
    return widen_bf16(h);
}

INLINE vi round_bf16(vf x) {  /* the same in each lane, in the low half */
    const vi b = (vi)x, r = (vi)(((b + 0x7fff + ((b >> 16) & 1)) >> 16) & 0xffff), nan = x != x;
    return (r & ~nan) | (0x7fc0 & nan);
}

/* The first n of WIDTH values of BF16, then zeros */
INLINE vf load_edge(const uint16_t *x, int64_t n) {
    uint16_t edge[WIDTH] = {0};
    memcpy(edge, x, (size_t)(n * 2));
    return load_bf16(edge);
}

/* ---- e4m3fn ------------------------------------------------------------------------------- */

static inline float decode_e4m3(uint8_t q) {
    uint32_t a = q & 0x7fu;
    /* No intermediate is an FP32 subnormal: some libraries disable those for the whole process. */
    float v = a < 8u ? (float)(int32_t)a * 0x1p-9f : as_float((a << 20) + (120u << 23));
    v = a == 0x7fu ? as_float(0x7fc00000u) : v;
    return q & 0x80u ? -v : v;
}

/* LANES codes -> values divided by SMALLER, exactly; NaN becomes 480 / SMALLER. */
#if WIDTH > 4
/* The bits of a code, shifted, are those of the FP16 value divided by 2^8, subnormals included. The conversion from FP16 ignores the
 * mode that turns subnormals off. */
#define SMALLER 256.0f
INLINE lanes decode_smaller(const uint8_t *q) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)q)), 7);
    const __m256i half = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xbfff));
#if WIDTH == 16
    return (lanes){{(vf)_mm512_cvtph_ps(half)}};
#else
    return (lanes){{(vf)_mm256_cvtph_ps(_mm256_castsi256_si128(half)), (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))}};
#endif
}
#else
#define SMALLER 1.0f
INLINE lanes decode_smaller(const uint8_t *q) {
    lanes found;
    for (int i = 0; i < LANES; i++) found.part[i / WIDTH][i % WIDTH] = decode_e4m3(q[i]);
    return found;
}
#endif
