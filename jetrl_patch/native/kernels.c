/* CPU kernels of the exact FP8 mode.
 *
 * One rule holds for every function of the forward pass: the bits of an output row depend only on that row's inputs. (The groups of
 * jetrl_quantize_tokens and jetrl_quantize_blocks span several rows.) Sums have a fixed order. Tiles only decide when a row is computed,
 * and threads split rows or columns, never a sum. So decoding one token and training on a packed batch give the same bits.
 *
 * Legend: M tokens, N output features, K input features, G = ceil(K/128) groups, T query tokens,
 * H query heads, D head width, L keys. All matrices are row-major; `ld*` is the row stride in elements.
 * BF16 values are passed as uint16_t, e4m3fn bytes as uint8_t.
 */
#include "numbers.h"

static inline uint8_t encode_e4m3(float y) {  /* saturating round to nearest even; NaN -> 0x7f */
    uint32_t b = as_bits(y), sign = (b >> 24) & 0x80u, a = b & 0x7fffffffu;
    uint32_t normal = (a + 0x7ffffu + ((a >> 20) & 1u) - (120u << 23)) >> 20;
    uint32_t tiny = as_bits(as_float(a) + 16384.0f) - as_bits(16384.0f);  /* steps of 2^-9 below 2^-6 */
    uint32_t code = a < 0x3c800000u ? tiny : normal;
    code = a >= 0x43e00000u ? 0x7eu : code;  /* 448 and above */
    code = a > 0x7f800000u ? 0x7fu : code;
    return (uint8_t)(sign | code);
}

static inline float scale_of(uint32_t amax_bits, int pow2) {
    /* The bits of non-negative floats order like integers, and NaN is above all of them, so the maximum keeps it. */
    float amax = as_float(amax_bits);
    float s = (amax_bits < 0x2edbe6ffu ? 1e-10f : amax) / 448.0f;
    if (pow2) {
        uint32_t b = as_bits(s);
        if (b < 0x7f800000u) s = as_float((b + 0x7fffffu) & 0x7f800000u);
    }
    return s;
}

static __attribute__((noinline)) uint32_t amax_of(const uint16_t *restrict x, int64_t n) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t a = ((uint32_t)x[i] << 16) & 0x7fffffffu;
        amax = a > amax ? a : amax;
    }
    return amax;
}

static __attribute__((noinline)) void encode_run(const uint16_t *restrict x, float scale, int64_t n, uint8_t *restrict q) {
    for (int64_t i = 0; i < n; i++) q[i] = encode_e4m3(from_bf16(x[i]) / scale);
}

/* X [M,K] bf16 -> q [M,K], s [M,ceil(K/group)]: groups along a row. */
void jetrl_quantize_rows(const uint16_t *x, int64_t ldx, int64_t M, int64_t K, int64_t group, int pow2,
                         uint8_t *q, float *s, int threads) {
    const int64_t G = (K + group - 1) / group;
#pragma omp parallel for num_threads(threads) if (threads > 1 && M > 1)
    for (int64_t m = 0; m < M; m++)
        for (int64_t g = 0; g < G; g++) {
            const int64_t k = g * group, n = K - k < group ? K - k : group;
            const float scale = scale_of(amax_of(x + m * ldx + k, n), pow2);
            s[m * G + g] = scale;
            encode_run(x + m * ldx + k, scale, n, q + m * K + k);
        }
}

static __attribute__((noinline)) void amax_columns(const uint16_t *restrict x, int64_t n, uint32_t *restrict amax) {
    for (int64_t k = 0; k < n; k++) {
        const uint32_t a = ((uint32_t)x[k] << 16) & 0x7fffffffu;
        amax[k] = a > amax[k] ? a : amax[k];
    }
}

static __attribute__((noinline)) void encode_columns(const uint16_t *restrict x, const float *restrict s, int64_t n, uint8_t *restrict q) {
    for (int64_t k = 0; k < n; k++) q[k] = encode_e4m3(from_bf16(x[k]) / s[k]);
}

/* X [M,K] bf16 -> q [M,K], s [ceil(M/group),K]: groups of tokens, for WGrad. */
void jetrl_quantize_tokens(const uint16_t *x, int64_t ldx, int64_t M, int64_t K, int64_t group, int pow2,
                           uint8_t *q, float *s, int threads) {
    const int64_t GM = (M + group - 1) / group;
#pragma omp parallel for num_threads(threads) if (threads > 1 && GM > 1)
    for (int64_t g = 0; g < GM; g++) {
        const int64_t m0 = g * group, m1 = m0 + group < M ? m0 + group : M;
        float *sg = s + g * K;
        memset(sg, 0, (size_t)K * 4);
        for (int64_t m = m0; m < m1; m++) amax_columns(x + m * ldx, K, (uint32_t *)sg);
        for (int64_t k = 0; k < K; k++) sg[k] = scale_of(as_bits(sg[k]), pow2);
        for (int64_t m = m0; m < m1; m++) encode_columns(x + m * ldx, sg, K, q + m * K);
    }
}

/* W [N,K] bf16 -> q [N,K], s [ceil(N/128),G]: blocks of 128x128. */
void jetrl_quantize_blocks(const uint16_t *w, int64_t ldw, int64_t N, int64_t K, int pow2,
                           uint8_t *q, float *s, int threads) {
    const int64_t G = (K + GROUP - 1) / GROUP, GN = (N + GROUP - 1) / GROUP;
#pragma omp parallel for num_threads(threads) if (threads > 1 && GN > 1)
    for (int64_t b = 0; b < GN; b++)
        for (int64_t g = 0; g < G; g++) {
            const int64_t n0 = b * GROUP, n1 = n0 + GROUP < N ? n0 + GROUP : N;
            const int64_t k = g * GROUP, width = K - k < GROUP ? K - k : GROUP;
            uint32_t amax = 0;
            for (int64_t n = n0; n < n1; n++) {
                const uint32_t a = amax_of(w + n * ldw + k, width);
                amax = a > amax ? a : amax;
            }
            const float scale = scale_of(amax, pow2);
            s[b * G + g] = scale;
            for (int64_t n = n0; n < n1; n++) encode_run(w + n * ldw + k, scale, width, q + n * K + k);
        }
}

/* q [M,K] with s[(m / row_group) * lds + k / col_group] -> FP32 or BF16 (exact for power-of-two scales). */
void jetrl_dequantize(const uint8_t *q, const float *s, int64_t lds, int64_t M, int64_t K,
                      int64_t row_group, int64_t col_group, int bf16, void *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && M > 1)
    for (int64_t m = 0; m < M; m++) {
        const float *sr = s + (m / row_group) * lds;
        const uint8_t *qr = q + m * K;
        for (int64_t k0 = 0; k0 < K; k0 += col_group == 1 ? K : col_group) {
            const int64_t k1 = col_group == 1 ? K : (k0 + col_group < K ? k0 + col_group : K);
            const float fixed = sr[col_group == 1 ? 0 : k0 / col_group];
            for (int64_t k = k0; k < k1; k++) {
                const float v = decode_e4m3(qr[k]) * (col_group == 1 ? sr[k] : fixed);
                if (bf16) ((uint16_t *)out)[m * K + k] = to_bf16(v);
                else ((float *)out)[m * K + k] = v;
            }
        }
    }
}

/* A 64-bit fingerprint of `bytes` bytes. It shows whether a weight has changed since it was quantized. */
uint64_t jetrl_fingerprint(const uint8_t *data, int64_t bytes) {
    uint64_t lane[8], tail[8] = {0};
    for (int i = 0; i < 8; i++) lane[i] = 0x9e3779b97f4a7c15ull * (uint64_t)(i + 1);
    int64_t at = 0;
    for (; at + 64 <= bytes; at += 64)
        for (int i = 0; i < 8; i++) {
            uint64_t word;
            memcpy(&word, data + at + 8 * i, 8);
            lane[i] = (lane[i] ^ word) * 0xff51afd7ed558ccdull;
            lane[i] ^= lane[i] >> 32;
        }
    memcpy(tail, data + at, (size_t)(bytes - at));
    uint64_t h = (uint64_t)bytes;
    for (int i = 0; i < 8; i++) {
        h = (h ^ lane[i]) * 0xff51afd7ed558ccdull; h ^= h >> 32;
        h = (h ^ tail[i]) * 0xc4ceb9fe1a85ec53ull; h ^= h >> 32;
    }
    return h;
}

/* ---- ops between the linears -------------------------------------------------------------- */

/* Y = bf16(w * bf16(x * rsqrt(mean(x^2) + eps))), the rounding order of Hugging Face models; with `plus`, of those that multiply
 * by 1 + w: bf16((1 + w) * (x * rsqrt(...))). */
void jetrl_rms_norm(const uint16_t *x, const uint16_t *w, int64_t M, int64_t K, float eps, int plus, uint16_t *y,
                    float *rstd, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && M > 1)
    for (int64_t m = 0; m < M; m++) {
        const uint16_t *row = x + m * K;
        lanes sum = {0};
        int64_t k = 0;
        for (; k + LANES <= K; k += LANES)
            for (int i = 0; i < PARTS; i++) {
                const vf v = load_bf16(row + k + i * WIDTH);
                sum.part[i] = fma_v(v, v, sum.part[i]);
            }
        for (int i = 0; i < PARTS && k < K; i++, k += WIDTH) {
            const vf v = K - k >= WIDTH ? load_bf16(row + k) : load_edge(row + k, K - k);
            sum.part[i] = fma_v(v, v, sum.part[i]);
        }
        const float r = 1.0f / sqrtf(lane_sum(sum) / (float)K + eps);
        if (rstd) rstd[m] = r;
        if (plus)
            for (int64_t i = 0; i < K; i++) y[m * K + i] = to_bf16((1.0f + from_bf16(w[i])) * (from_bf16(row[i]) * r));
        else
            for (int64_t i = 0; i < K; i++) y[m * K + i] = to_bf16(from_bf16(w[i]) * from_bf16(to_bf16(from_bf16(row[i]) * r)));
    }
}

/* Y = bf16(bf16(silu(g)) * u), element by element; g and u [M,K] with row strides. */
void jetrl_silu_mul(const uint16_t *g, int64_t ldg, const uint16_t *u, int64_t ldu, int64_t M, int64_t K,
                    uint16_t *y, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && M > 1)
    for (int64_t m = 0; m < M; m++)
        for (int64_t k = 0; k < K; k += WIDTH) {
            const int64_t at = m * ldg + k, n = K - k < WIDTH ? K - k : WIDTH;
            const vf v = n == WIDTH ? load_bf16(g + at) : load_edge(g + at, n);
            const vf silu = (vf)(round_bf16(v / (1.0f + exp_v(-v))) << 16);
            const vf up = n == WIDTH ? load_bf16(u + m * ldu + k) : load_edge(u + m * ldu + k, n);
            const vh out = __builtin_convertvector(round_bf16(silu * up), vh);
            memcpy(y + m * K + k, &out, (size_t)(n * 2));
        }
}

/* Index of the largest v [n] that is not taken and whose group of `size` is open (NULL: all are); the lower index on a tie. */
static int64_t largest(const float *v, const uint8_t *taken, int64_t n, const uint8_t *open, int64_t size) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (!open || open[i / size]) && (best < 0 || v[i] > v[best])) best = i;
    return best;
}

/* Router of a mixture. Scores p [M,E] are computed in FP64 and rounded to FP32. Each row gets the k experts with the largest score,
 * the lower index on a tie, in ascending order. Without a bias, p = softmax(logits), summed over ascending experts. With a bias [E],
 * p = sigmoid(logits), and experts are chosen by c = p + bias, from the `kept` of `groups` groups whose two largest c have the
 * largest sum. `renormalize` divides the weights p by their sum, with one rounding. Then they are multiplied by `scale`.
 * A NaN among the logits makes every weight of its row NaN. ids, weights [M,k]. */
void jetrl_route(const float *logits, int64_t M, int64_t E, int64_t k, int renormalize, const float *bias, int64_t groups,
                 int64_t kept, float scale, int64_t *ids, float *weights, int threads) {
    const int64_t size = E / groups;
#pragma omp parallel for num_threads(threads) if (threads > 1 && M > 1)
    for (int64_t m = 0; m < M; m++) {
        const float *row = logits + m * E;
        float p[E], c[E], of_group[groups];
        uint8_t taken[E], open[groups];
        double top = -INFINITY, sum = 0.0, total = 0.0;
        int special = 0;
        for (int64_t e = 0; e < E; e++) { top = row[e] > top ? row[e] : top; special |= row[e] != row[e]; taken[e] = 0; }
        if (!bias)
            for (int64_t e = 0; e < E; e++) sum += exp((double)row[e] - top);
        for (int64_t e = 0; e < E; e++) {
            p[e] = (float)(bias ? 1.0 / (1.0 + exp(-(double)row[e])) : exp((double)row[e] - top) / sum);
            c[e] = bias ? p[e] + bias[e] : p[e];
        }
        for (int64_t g = 0; g < groups; g++) {
            float first = -INFINITY, second = -INFINITY;
            for (int64_t e = g * size; e < (g + 1) * size; e++) {
                if (c[e] > first) { second = first; first = c[e]; }
                else if (c[e] > second) second = c[e];
            }
            of_group[g] = first + second;
            open[g] = groups == kept;
        }
        for (int64_t j = 0; j < kept && kept < groups; j++) open[largest(of_group, open, groups, NULL, 1)] = 1;
        for (int64_t j = 0; j < k; j++) taken[largest(c, taken, E, open, size)] = 1;
        int64_t j = m * k;
        for (int64_t e = 0; e < E; e++)
            if (taken[e]) { total += p[e]; ids[j] = e; weights[j++] = special ? NAN : p[e]; }
        if (bias) total += 1e-20; /* as in the models, because all scores may be zero */
        for (j = m * k; j < (m + 1) * k; j++) weights[j] = (renormalize ? (float)(weights[j] / total) : weights[j]) * scale;
    }
}

/* Rotary embedding in the rounding order of Hugging Face: bf16(bf16(x*cos) + bf16(rotate_half(x)*sin)).
 * x [T,h,D] with token stride ldx and head stride D; cos, sin [P,D/2]; pos [T]. In place if y == x. */
void jetrl_rotary(const uint16_t *x, int64_t ldx, const uint16_t *cos, const uint16_t *sin, const int64_t *pos,
                  int64_t T, int64_t h, int64_t D, uint16_t *y, int64_t ldy, int threads) {
    const int64_t half = D / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && T > 1)
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < h; i++) {
            const uint16_t *a = x + t * ldx + i * D, *c = cos + pos[t] * half, *s = sin + pos[t] * half;
            uint16_t *o = y + t * ldy + i * D;
            for (int64_t d = 0; d < half; d++) {
                const float lo = from_bf16(a[d]), hi = from_bf16(a[d + half]), cd = from_bf16(c[d]), sd = from_bf16(s[d]);
                const float lc = from_bf16(to_bf16(lo * cd)), hs = from_bf16(to_bf16(hi * sd));
                const float hc = from_bf16(to_bf16(hi * cd)), ls = from_bf16(to_bf16(lo * sd));
                o[d] = to_bf16(lc - hs);
                o[d + half] = to_bf16(hc + ls);
            }
        }
}

/* p[j] = q . k[j] * scale for n keys of D values, in 16 lanes of FMAs; returns the largest. */
INLINE float scores(const float *q, const float *k, int64_t n, const int64_t D, float scale, float *p) {
    float top = -INFINITY;
    for (int64_t j = 0; j < n; j++) {
        lanes dot = {0};
        for (int64_t d = 0; d < D; d += LANES)
            for (int i = 0; i < PARTS; i++) {
                const int64_t at = d + i * WIDTH;
                dot.part[i] = fma_v(*(const vf *)(q + at), *(const vf *)(k + j * D + at), dot.part[i]);
            }
        p[j] = lane_sum(dot) * scale;
        top = p[j] > top ? p[j] : top;
    }
    return top;
}

/* o = sum over n values of p[j] * v[j], for LANES * count of their D columns. */
INLINE void weigh(const int count, const float *p, const float *v, int64_t n, int64_t D, float *o) {
    vf sum[4 * PARTS];
    for (int i = 0; i < count * PARTS; i++) sum[i] = (vf){0};
    for (int64_t j = 0; j < n; j++) {
        const vf weight = all(p[j]);
        for (int i = 0; i < count * PARTS; i++) sum[i] = fma_v(*(const vf *)(v + j * D + i * WIDTH), weight, sum[i]);
    }
    memcpy(o, sum, (size_t)(count * LANES * 4));
}

/* Causal attention over a paged or contiguous cache. Request r has the queries q_start[r]..q_start[r+1]-1, which are
 * the last of its seq_lens[r] positions. Its key j is D numbers, its value j is V numbers, each at
 *   base + block_table[r*ldb + j/BS]*block_stride + (j%BS)*token_stride + head*head_stride
 * with strides of its own. Scores, weights and sums are FP32 over ascending keys, in two passes, with one rounding to BF16.
 * lse [T,H] may be NULL. Returns 0, or 1 if out of memory. */
int jetrl_attention(const uint16_t *q, int64_t ldq, const uint16_t *kc, int64_t k_block, int64_t k_token, int64_t k_head,
                    const uint16_t *vc, int64_t v_block, int64_t v_token, int64_t v_head, const int32_t *block_table,
                    int64_t ldb, int64_t BS, const int32_t *seq_lens, const int32_t *q_start, int64_t R, int64_t H,
                    int64_t KH, int64_t D, int64_t V, float scale, uint16_t *out, int64_t ldo, float *lse, int threads) {
    const int64_t Dp = round_up(D, LANES), Vp = round_up(V, LANES), per = H / KH;
    int failed = 0;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < R; r++)
        for (int64_t kh = 0; kh < KH; kh++) {
            const int64_t L = seq_lens[r], q0 = q_start[r], q1 = q_start[r + 1];
            if (q1 <= q0) continue;
            const int64_t Lp = round_up(L, LANES);
            float *keys = aligned_alloc(64, (size_t)round_up((L * (Dp + Vp) + Lp + Dp + Vp) * 4, 64));
            if (!keys) { failed = 1; continue; }
            float *values = keys + L * Dp, *p = values + L * Vp, *qf = p + Lp, *o = qf + Dp;
            for (int64_t j = 0; j < L; j++) {
                const int64_t block = block_table[r * ldb + j / BS], row = j % BS;
                const uint16_t *k = kc + block * k_block + row * k_token + kh * k_head;
                const uint16_t *v = vc + block * v_block + row * v_token + kh * v_head;
                for (int64_t d = 0; d < D; d++) keys[j * Dp + d] = from_bf16(k[d]);
                for (int64_t d = 0; d < V; d++) values[j * Vp + d] = from_bf16(v[d]);
                for (int64_t d = D; d < Dp; d++) keys[j * Dp + d] = 0.0f;
                for (int64_t d = V; d < Vp; d++) values[j * Vp + d] = 0.0f;
            }
            for (int64_t t = q0; t < q1; t++)
                for (int64_t h = kh * per; h < (kh + 1) * per; h++) {
                    const int64_t n = L - (q1 - t) + 1;  /* causal: this row sees n keys */
                    for (int64_t d = 0; d < D; d++) qf[d] = from_bf16(q[t * ldq + h * D + d]);
                    for (int64_t d = D; d < Dp; d++) qf[d] = 0.0f;
                    const float top = Dp == 64    ? scores(qf, keys, n, 64, scale, p)
                                      : Dp == 128 ? scores(qf, keys, n, 128, scale, p)
                                                  : scores(qf, keys, n, Dp, scale, p);
                    for (int64_t j = n; j < round_up(n, LANES); j++) p[j] = -INFINITY;
                    for (int64_t j = 0; j < n; j += WIDTH) *(vf *)(p + j) = exp_v(*(vf *)(p + j) - top);
                    float sum = 0.0f;
                    for (int64_t j = 0; j < n; j++) sum += p[j];
                    int64_t at = 0;
                    for (; at + 4 * LANES <= Vp; at += 4 * LANES) weigh(4, p, values + at, n, Vp, o + at);
                    for (; at < Vp; at += LANES) weigh(1, p, values + at, n, Vp, o + at);
                    for (int64_t d = 0; d < V; d++) out[t * ldo + h * V + d] = to_bf16(o[d] / sum);
                    if (lse) lse[t * H + h] = top + logf(sum);
                }
            free(keys);
        }
    return failed;
}
