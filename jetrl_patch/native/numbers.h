/* Vectors, and conversions of BF16 and e4m3fn, for all C sources here. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define LANES 16
#define GROUP 128

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));

static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

static inline float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

static inline float from_bf16(uint16_t x) { return as_float((uint32_t)x << 16); }

static inline uint16_t to_bf16(float f) {  /* round to nearest even; NaN stays NaN */
    uint32_t b = as_bits(f);
    uint32_t r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return (b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)r;
}

static inline float decode_e4m3(uint8_t q) {
    uint32_t a = q & 0x7fu;
    /* No intermediate is an FP32 subnormal: some libraries disable those for the whole process. */
    float v = a < 8u ? (float)(int32_t)a * 0x1p-9f : as_float((a << 20) + (120u << 23));
    v = a == 0x7fu ? as_float(0x7fc00000u) : v;
    return q & 0x80u ? -v : v;
}
