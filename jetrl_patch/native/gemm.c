/* GEMM of the exact FP8 mode on the CPU: Y [M,N] = X [M,K] * W [N,K]^T, by the rule and the legend of kernels.c.
 *
 * A SIMD lane is an output column. dot += x[m][k] * w[k][lane] over ascending k, one FMA each. After a group of K,
 * total = fma(dot, sX * sW, total) for FP8; for BF16 one dot runs over all groups. Every element is summed in the
 * order k = 0, 1, 2, ..., whatever its tile and the instruction set.
 *
 * How a weight is read: NT columns of one group of K are transposed to `codes` [k][NT], still e4m3 or BF16, unless `jetrl_pack` has
 * done so. Few rows read the codes and convert them as they go. For more rows, the codes are widened once, to FP32 (`widen`) or to
 * pairs of BF16 (`pair_weights`), and each register tile (`tile`) reads the result. */
#include "numbers.h"

#if defined(__AVX512BF16__) && WIDTH == 16
#define PAIRS
#endif

#define NT 32     /* columns of a tile */
#define MTILE 256 /* rows whose operands and sums are kept in scratch at a time */
#define VECTORS (NT / WIDTH)

/* Rows of a register tile, and its vectors of columns. The accumulators must fit in the registers, and there must be enough of them
 * to hide the latency of an FMA. */
#if WIDTH == 16
#define MR 8
#define ACROSS(rows) 2
#else
#define MR 6
#define ACROSS(rows) ((rows) > 3 ? VECTORS / 2 : VECTORS)
#endif

/* With up to this many rows, codes are converted as they are read. */
#ifdef PAIRS
#define FEW 4
#else
#define FEW MR
#endif

/* ---- transposing -------------------------------------------------------------------------- */

#if WIDTH > 4
/* Each 128-bit half of the vectors is a square, which rounds of interleaving vector i with vector i + count / 2 transpose. */
#define TRANSPOSE(name, count, low, high)                                                    \
    INLINE void name(__m256i r[count]) {                                                     \
        __m256i t[count];                                                                    \
        for (int round = 1; round < count; round *= 2) {                                     \
            for (int i = 0; i < count / 2; i++) {                                            \
                t[2 * i] = low(r[i], r[i + count / 2]), t[2 * i + 1] = high(r[i], r[i + count / 2]); \
            }                                                                                \
            memcpy(r, t, sizeof t);                                                          \
        }                                                                                    \
    }
TRANSPOSE(transpose_bytes, 16, _mm256_unpacklo_epi8, _mm256_unpackhi_epi8)
TRANSPOSE(transpose_halves, 8, _mm256_unpacklo_epi16, _mm256_unpackhi_epi16)

INLINE __m256i two_rows(const uint8_t *a, const uint8_t *b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a)), _mm_loadu_si128((const __m128i *)b), 1);
}

/* 16 columns, or NT of bytes, and 16 bytes of K: w[column][k] -> codes[k][column], whose rows have NT columns. */
INLINE void transpose(const uint8_t *w, int64_t ldw, int size, uint8_t *codes) {
    __m256i r[16];
    if (size == 1) {
        for (int j = 0; j < 16; j++) r[j] = two_rows(w + j * ldw, w + (j + 16) * ldw);
        transpose_bytes(r);
        for (int k = 0; k < 16; k++) _mm256_storeu_si256((__m256i *)(codes + k * NT), r[k]);
    } else
        for (int half = 0; half < NT; half += 16) {
            for (int j = 0; j < 8; j++) r[j] = two_rows(w + (half + j) * ldw, w + (half + j + 8) * ldw);
            transpose_halves(r);
            for (int k = 0; k < 8; k++) _mm256_storeu_si256((__m256i *)(codes + (k * NT + half) * 2), r[k]);
        }
}
#else
INLINE void transpose(const uint8_t *w, int64_t ldw, int size, uint8_t *codes) {
    for (int k = 0; k < 16 / size; k++)
        for (int j = 0; j < NT; j++) memcpy(codes + (k * NT + j) * size, w + j * ldw + k * size, (size_t)size);
}
#endif

/* n <= NT columns of W and `count` of K, from w: codes[k][column], zeros beyond n. `ldw` in bytes. */
static void lay_out(const uint8_t *w, int64_t ldw, int64_t n, int64_t count, const int size, uint8_t *codes) {
    const int64_t step = 16 / size;
    for (int64_t k = 0; k < count; k += step) {
        if (n == NT && k + step <= count) {
            transpose(w + k * size, ldw, size, codes + k * NT * size);
            continue;
        }
        uint8_t edge[NT][16] = {{0}}, out[16 * NT];
        const int64_t left = count - k < step ? count - k : step;
        for (int64_t j = 0; j < n; j++) memcpy(edge[j], w + j * ldw + k * size, (size_t)(left * size));
        transpose(edge[0], 16, size, out);
        memcpy(codes + k * NT * size, out, (size_t)(left * NT * size));
    }
}

static int has_nan(const uint8_t *codes, int64_t count) {
    uint8_t found = 0;
    for (int64_t i = 0; i < count; i++) found |= (uint8_t)((codes[i] & 0x7f) == 0x7f);
    return found;
}

/* W e4m3 [N,K] -> packed [ceil(N/NT)][K][NT]. Returns whether a value is NaN. */
int jetrl_pack(const uint8_t *w, int64_t ldw, int64_t N, int64_t K, uint8_t *packed, int threads) {
    int found = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(| : found)
    for (int64_t n = 0; n < N; n += NT) {
        lay_out(w + n * ldw, ldw, N - n < NT ? N - n : NT, K, 1, packed + n * K);
        found |= has_nan(packed + n * K, K * NT);
    }
    return found;
}

/* ---- sums --------------------------------------------------------------------------------- */

/* What a weight is read as: FP32, e4m3 codes without NaN, or BF16. For codes, x is multiplied by SMALLER. */
typedef enum { WIDE, CODES, HALVES } form;

/* LANES columns of a weight */
INLINE lanes columns(const form as, const void *w) {
    lanes found;
    if (as == CODES) return decode_smaller(w);
    for (int i = 0; i < PARTS; i++) {
        if (as == HALVES) found.part[i] = load_bf16((const uint16_t *)w + i * WIDTH);
        else found.part[i] = *(const vf *)((const float *)w + i * WIDTH);
    }
    return found;
}

/* codes -> wt[k][column] in FP32. `clean`: there is no NaN. */
static void widen(const uint8_t *codes, int64_t count, const form as, int clean, float *wt) {
    const int64_t n = count * NT;
    if (as == CODES && !clean)
        for (int64_t i = 0; i < n; i++) wt[i] = decode_e4m3(codes[i]);
    else
        for (int64_t i = 0; i < n; i += LANES) {
            const lanes w = columns(as, codes + i * (as == CODES ? 1 : 2));
            for (int p = 0; p < PARTS; p++) *(vf *)(wt + i + p * WIDTH) = w.part[p] * (as == CODES ? SMALLER : 1.0f);
        }
}

/* total += a * s * sw, one FMA for each column, or total = a without scales */
INLINE void add_up(const int count, const vf *a, const float *s, const float *sw, float *total) {
    for (int c = 0; c < count; c++) {
        vf *t = (vf *)(total + c * WIDTH);
        *t = s ? fma_v(a[c], *(const vf *)(sw + c * WIDTH) * *s, *t) : a[c];
    }
}

/* rows x (across * WIDTH) columns over one group of K, from w[k][column]. FP8: dot starts at zero and is scaled into `total`;
 * BF16: dot continues `total`. */
INLINE void tile(const int rows, const int across, const form as, const float *x, int64_t ldx, const void *w, int64_t count,
                 const float *sx, int64_t ldsx, const float *sw, float *total) {
    const int64_t row = NT * (as == WIDE ? 4 : as == HALVES ? 2 : 1), step = row / NT * LANES;
    vf a[MR][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < across; c++) a[i][c] = sx ? (vf){0} : *(vf *)(total + i * NT + c * WIDTH);
    for (int64_t k = 0; k < count; k++) {
        /* There are few registers: with few rows they hold x, and with more rows the weights. */
        vf v[MR], wk[VECTORS];
        for (int i = 0; i < rows && rows < 4; i++) v[i] = all(x[i * ldx + k]);
        for (int c = 0; c < across; c += PARTS) {
            const lanes some = columns(as, (const char *)w + k * row + c / PARTS * step);
            for (int p = 0; p < PARTS; p++) {
                wk[c + p] = some.part[p];
                for (int i = 0; i < rows && rows < 4; i++) a[i][c + p] = fma_v(wk[c + p], v[i], a[i][c + p]);
            }
        }
        for (int i = 0; i < rows && rows >= 4; i++) {
            const vf one = all(x[i * ldx + k]);
            for (int c = 0; c < across; c++) a[i][c] = fma_v(wk[c], one, a[i][c]);
        }
    }
    for (int i = 0; i < rows; i++) add_up(across, a[i], sx ? sx + i * ldsx : 0, sw, total + i * NT);
}

/* ---- pairs of BF16 ------------------------------------------------------------------------ */

/* VDPBF16PS adds the products of two BF16 pairs to an FP32 sum: first that of the high halves, rounding after each. A product of two
 * e4m3 values is exact in FP32. So with the lower k in the high half, the bits are those of two FMAs, in half the instructions.
 * `use_pairs` tests this on the processor. */
static int wanted = 1;

#ifdef PAIRS
static inline uint32_t bf16_of_e4m3(uint32_t q) {
    const uint32_t a = q & 0x7fu;
    uint32_t bits = a < 8u ? as_bits((float)(int32_t)a * 0x1p-9f) >> 16 : (a << 4) + (120u << 7);
    bits = a == 0x7fu ? 0x7fc0u : bits;
    return bits | (q & 0x80u) << 8;
}

static void pair_row(const uint8_t *restrict x, int64_t K, uint32_t *restrict out) {
    for (int64_t k = 0; k + 1 < K; k += 2) out[k / 2] = bf16_of_e4m3(x[k]) << 16 | bf16_of_e4m3(x[k + 1]);
    if (K & 1) out[K / 2] = bf16_of_e4m3(x[K - 1]) << 16;
}

/* As widen, for two k in each word: wt[k / 2][column]. A missing last k is zero. */
static void pair_weights(const uint8_t *codes, int64_t count, uint32_t *wt) {
    /* the bytes of the BF16 values of the codes 0 to 7: 0, 2^-9, 2^-8, ... */
    const __m512i high_small = _mm512_set1_epi64(0x3c3c3c3c3b3b3b00), low_small = _mm512_set1_epi64(0x60402000c0800000);
    /* a vector holds two k: its BF16 values, by columns, k + 1 below k */
    uint16_t order[32];
    for (int c = 0; c < 16; c++) {
        order[2 * c + 1] = (uint16_t)(c < 8 ? c : 32 + c - 8);
        order[2 * c] = (uint16_t)(order[2 * c + 1] + 16);
    }
    const __m512i first = _mm512_loadu_si512(order), second = _mm512_add_epi16(first, _mm512_set1_epi16(8));
    for (int64_t k = 0; k < count; k += 2) {
        const __m512i q = k + 1 < count ? _mm512_loadu_si512(codes + k * NT)
                                        : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(codes + k * NT)));
        const __m512i a = _mm512_and_si512(q, _mm512_set1_epi8(0x7f));
        const __mmask64 small = _mm512_cmplt_epu8_mask(a, _mm512_set1_epi8(8));
        const __mmask64 nan = _mm512_cmpeq_epi8_mask(a, _mm512_set1_epi8(0x7f));
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(0x0f));
        __m512i low = _mm512_and_si512(_mm512_slli_epi16(a, 4), _mm512_set1_epi8((char)0xf0));
        high = _mm512_mask_shuffle_epi8(_mm512_add_epi8(high, _mm512_set1_epi8(0x3c)), small, high_small, a);
        low = _mm512_mask_shuffle_epi8(low, small, low_small, a);
        high = _mm512_mask_mov_epi8(high, nan, _mm512_set1_epi8(0x7f));
        low = _mm512_mask_mov_epi8(low, nan, _mm512_set1_epi8((char)0xc0));
        high = _mm512_or_si512(high, _mm512_andnot_si512(_mm512_set1_epi8(0x7f), q));
        const __m512i u0 = _mm512_unpacklo_epi8(low, high), u1 = _mm512_unpackhi_epi8(low, high);
        _mm512_storeu_si512(wt + k / 2 * NT, _mm512_permutex2var_epi16(u0, first, u1));
        _mm512_storeu_si512(wt + k / 2 * NT + 16, _mm512_permutex2var_epi16(u0, second, u1));
    }
}

INLINE __m512 add_pair(__m512 sum, __m512i x, __m512i w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }

INLINE void tile_pairs(const int rows, const uint32_t *x, int64_t ldx, const uint32_t *wt, int64_t pairs, const float *sx,
                       int64_t ldsx, const float *sw, float *total) {
    vf a[MR][VECTORS];
    for (int i = 0; i < rows; i++) a[i][0] = a[i][1] = (vf){0};
    for (int64_t k = 0; k < pairs; k++) {
        const __m512i w0 = _mm512_loadu_si512(wt + k * NT), w1 = _mm512_loadu_si512(wt + k * NT + 16);
        for (int i = 0; i < rows; i++) {
            const __m512i v = _mm512_set1_epi32((int32_t)x[i * ldx + k]);
            a[i][0] = (vf)add_pair((__m512)a[i][0], v, w0);
            a[i][1] = (vf)add_pair((__m512)a[i][1], v, w1);
        }
    }
    for (int i = 0; i < rows; i++) add_up(VECTORS, a[i], sx + i * ldsx, sw, total + i * NT);
}

static int use_pairs(void) {
    /* 2^24 + 3 - 1 and 2^24 + 1 + 1 show the order, and whether each addition rounds */
    const __m512i x = _mm512_set1_epi32(0x3f803f80);
    const float one = _mm512_cvtss_f32(add_pair(_mm512_set1_ps(0x1p24f), x, _mm512_set1_epi32(0x3f803f80)));
    const float other = _mm512_cvtss_f32(add_pair(_mm512_set1_ps(0x1p24f), x, _mm512_set1_epi32(0x4040bf80)));
    return wanted && one == 0x1p24f && other == 0x1p24f + 4.0f;
}
#else
static int use_pairs(void) { return 0; }
#endif

/* For tests: whether pairs may be used from now on. Returns whether they are. */
int jetrl_pairs(int on) { wanted = on; return use_pairs(); }

/* ---- the product -------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *x, *w, *packed;
    const float *sx, *sw;
    int64_t ldx, ldw, ldsw, M, N, K, G; /* ldx, ldw in bytes */
    int64_t group;
    int fp8;
} product;

typedef struct {  /* scratch of a thread */
    float *wt, *sw, *sum, *part;
    uint8_t *codes;
} room;

/* Calls CALL(rows) with the number of rows as a constant. */
#define BY_ROWS(rows, CALL)                                                                         \
    switch (rows) {                                                                                 \
        case 1: CALL(1) break; case 2: CALL(2) break; case 3: CALL(3) break; case 4: CALL(4) break; \
        case 5: CALL(5) break; case 6: CALL(6) break; case 7: CALL(7) break; default: CALL(8)       \
    }

/* Up to MR rows of x, and `count` of K, times NT columns. */
INLINE void add_tile(const form as, int64_t rows, const float *x, int64_t ldx, const void *w, int64_t count, const float *sx,
                     int64_t ldsx, const float *sw, float *total) {
    const int64_t size = as == WIDE ? 4 : as == HALVES ? 2 : 1;
#define CALL(n)                                                                                     \
    if (n <= MR)                                                                                    \
        for (int c = 0; c < NT; c += WIDTH * ACROSS(n))                                             \
            tile(n, ACROSS(n), as, x, ldx, (const char *)w + c * size, count, sx, ldsx, sw + c, total + c);
    BY_ROWS(rows, CALL)
#undef CALL
}

/* Add one group of K, at k, of the columns from n on, to total [rows][NT]. x: FP32, or pairs, with a row stride of ldx. */
static void add_group(const product *p, const float *x, int64_t ldx, int64_t rows, int pairs, const float *sx, int64_t n,
                      int64_t k, int64_t count, const room *own, float *total) {
    const int64_t cols = p->N - n < NT ? p->N - n : NT, size = p->fp8 ? 1 : 2, g = k / p->group;
    for (int64_t j = 0; p->fp8 && j < NT; j++) own->sw[j] = j < cols ? p->sw[(n + j) * p->ldsw + g] : 0.0f;
    const uint8_t *codes = p->packed ? p->packed + n * p->K + k * NT : own->codes;
    if (!p->packed) lay_out(p->w + n * p->ldw + k * size, p->ldw, cols, count, (int)size, own->codes);
    const int clean = p->packed || !p->fp8 || !has_nan(codes, count * NT);
    if (rows <= FEW && clean) {
        float scaled[FEW * GROUP];
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < count; i++) scaled[r * GROUP + i] = x[r * ldx + i] * (p->fp8 ? SMALLER : 1.0f);
        if (p->fp8) add_tile(CODES, rows, scaled, GROUP, codes, count, sx, p->G, own->sw, total);
        else add_tile(HALVES, rows, scaled, GROUP, codes, count, 0, 0, own->sw, total);
        return;
    }
#ifdef PAIRS
    if (pairs) {
        pair_weights(codes, count, (uint32_t *)own->wt);
        for (int64_t i = 0; i < rows; i += MR) {
            const uint32_t *xi = (const uint32_t *)(x + i * ldx);
#define CALL(n) tile_pairs(n, xi, ldx, (const uint32_t *)own->wt, (count + 1) / 2, sx + i * p->G, p->G, own->sw, total + i * NT);
            BY_ROWS(rows - i, CALL)
#undef CALL
        }
        return;
    }
#endif
    (void)pairs;
    if (p->fp8) widen(codes, count, CODES, clean, own->wt);
    else widen(codes, count, HALVES, 1, own->wt);
    for (int64_t i = 0; i < rows; i += MR)
        add_tile(WIDE, rows - i < MR ? rows - i : MR, x + i * ldx, ldx, own->wt, count, sx ? sx + i * p->G : 0, p->G, own->sw,
                 total + i * NT);
}

static void read_row(const uint8_t *from, int64_t K, int fp8, float *row) {
    int64_t k = 0;
    for (; !fp8 && k + WIDTH <= K; k += WIDTH) *(vf *)(row + k) = load_bf16((const uint16_t *)from + k);
    for (; k < K; k++) row[k] = fp8 ? decode_e4m3(from[k]) : from_bf16(((const uint16_t *)from)[k]);
}

/* X: e4m3 with scales sx [M,G] or, with a block of 0, bf16; W likewise, with scales per row, sw [N,G]. G = ceil(K/block), and a
 * block is at most GROUP. `packed`: the output of jetrl_pack if W has no NaN, or NULL. `splits` > 1 adds the partial sums of `splits`
 * equal ranges of K in ascending order, as the ranks of a tensor-parallel rollout do. out: FP32 (bf16 = 0) or BF16, rounded once.
 * Returns 0, or 1 if out of memory. */
int jetrl_gemm(const void *x, int64_t ldx, const float *sx, const void *w, int64_t ldw, const float *sw,
               int64_t ldsw, const uint8_t *packed, int64_t M, int64_t N, int64_t K, int block, int splits, int bf16, void *out,
               int threads) {
    const int fp8 = block != 0;
    const int64_t size = fp8 ? 1 : 2, width = splits > 1 ? K / splits : K;
    const int64_t group = fp8 ? block : GROUP, G = (K + group - 1) / group;
    const product p = {x, w, packed, sx, sw, ldx * size, ldw * size, ldsw, M, N, K, G, group, fp8};
    const int64_t most = M < MTILE ? M : MTILE;
    const int64_t ldf = round_up(K, LANES) + LANES;  /* not a multiple of 4 KB, which would put all rows in one set of the L1 cache */
    float *xf = aligned_alloc(64, (size_t)(most * ldf * 4));
    if (!xf) return 1;
    int failed = 0;
    for (int64_t m = 0; m < M; m += MTILE) {
        const int64_t rows = M - m < MTILE ? M - m : MTILE;
        const int pairs = fp8 && rows > FEW && use_pairs();
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                const uint8_t *from = p.x + (m + r) * p.ldx;
#ifdef PAIRS
                if (pairs) pair_row(from, K, (uint32_t *)(xf + r * ldf));
                else
#endif
                    read_row(from, K, fp8, xf + r * ldf);
            }
            float *wt = aligned_alloc(64, (size_t)((GROUP + 1 + 2 * most) * NT * 4 + GROUP * NT * 2));
            if (!wt) failed = 1;
            const room own = {wt, wt + GROUP * NT, wt + (GROUP + 1) * NT, wt + (GROUP + 1 + most) * NT,
                              (uint8_t *)(wt + (GROUP + 1 + 2 * most) * NT)};
#pragma omp for schedule(dynamic, 1)
            for (int64_t n = 0; n < N; n += NT) {
                if (!wt) continue;
                for (int split = 0; split < splits; split++) {
                    const int64_t end = (split + 1) * width;
                    float *total = split ? own.part : own.sum;
                    memset(total, 0, (size_t)(rows * NT * 4));
                    for (int64_t k = split * width; k < end; k += group)
                        add_group(&p, xf + (pairs ? k / 2 : k), ldf, rows, pairs, sx ? sx + m * G + k / group : 0, n, k,
                                  end - k < group ? end - k : group, &own, total);
                    for (int64_t i = 0; split && i < rows * NT; i++) own.sum[i] += own.part[i];
                }
                const int64_t cols = N - n < NT ? N - n : NT;
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t at = (m + r) * N + n;
                    if (!bf16) memcpy((float *)out + at, own.sum + r * NT, (size_t)cols * 4);
                    for (int64_t j = 0; bf16 && j < cols; j++) ((uint16_t *)out)[at + j] = to_bf16(own.sum[r * NT + j]);
                }
            }
            free(wt);
        }
    }
    free(xf);
    return failed;
}
