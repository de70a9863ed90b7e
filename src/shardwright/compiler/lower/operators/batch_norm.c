/* Batch normalisation of values that lie as (samples, channels, size).
 *
 * A row is what one sample has of one channel. Sums within a row are made in the type of the values, of so many that
 * this loses nothing that counts, and added up in double. Several channels are gone through together, so that what is
 * read in one go is long, and so few that their values are still in a cache when they are read again.
 *
 * Where the channels come last, or there is nothing behind them, the size is 1: then it is columns that are added up,
 * a few of them beside each other.
 */
#ifndef VALUE

#include <math.h>
#include <stdint.h>

#define BLOCK 512 /* values whose sum is made in their own type */
#define STRETCH 512 /* values of a sample that are read in one go, at least */
#define COLUMNS 16
#define FAR 4 /* times the variance */
#define ROWS 64 /* of a column, whose sum is made in their own type */

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t channels_together(int64_t channels, int64_t size) {
    return least(channels, size < STRETCH ? STRETCH / size : 1);
}

#define VALUE float
#define OF_TYPE(name) name##_float32
#include "batch_norm.c"
#undef VALUE
#undef OF_TYPE
#define VALUE double
#define OF_TYPE(name) name##_float64
#include "batch_norm.c"

#else

static double OF_TYPE(sum)(const VALUE *x, int64_t size) {
    double sum = 0;
    for (int64_t from = 0; from < size; from += BLOCK) {
        VALUE part = 0;
        int64_t to = least(size, from + BLOCK);
#pragma omp simd reduction(+ : part)
        for (int64_t i = from; i < to; i++) part += x[i];
        sum += part;
    }
    return sum;
}

/* Adds the sums of g and of g · (x − about). */
static void OF_TYPE(add_products)(
    const VALUE *x, const VALUE *g, VALUE about, int64_t size, double *sum, double *products) {
    for (int64_t from = 0; from < size; from += BLOCK) {
        VALUE part = 0, product = 0;
        int64_t to = least(size, from + BLOCK);
#pragma omp simd reduction(+ : part, product)
        for (int64_t i = from; i < to; i++) {
            part += g[i];
            product += g[i] * (x[i] - about);
        }
        *sum += part;
        *products += product;
    }
}

static void OF_TYPE(add_squares)(const VALUE *x, VALUE about, int64_t size, double *sum, double *squares) {
    for (int64_t from = 0; from < size; from += BLOCK) {
        VALUE part = 0, square = 0;
        int64_t to = least(size, from + BLOCK);
#pragma omp simd reduction(+ : part, square)
        for (int64_t i = from; i < to; i++) {
            VALUE apart = x[i] - about;
            part += apart;
            square += apart * apart;
        }
        *sum += part;
        *squares += square;
    }
}

/* For some columns beside each other, COLUMNS at most, the sums of g and of g · (x − about), where g is x − about itself
 * if none is given.
 */
static inline __attribute__((always_inline)) void OF_TYPE(add_columns_of)(
    const VALUE *x, const VALUE *g, const VALUE *about, int64_t rows, int64_t width, int64_t number, double *sum,
    double *products) {
    for (int64_t from = 0; from < rows; from += ROWS) {
        VALUE part[COLUMNS] = {0}, product[COLUMNS] = {0};
        int64_t to = least(rows, from + ROWS);
        for (int64_t row = from; row < to; row++) {
            const VALUE *of_x = x + row * width, *of_g = g + row * width;
            for (int64_t c = 0; c < number; c++) {
                VALUE apart = of_x[c] - about[c], factor = g ? of_g[c] : apart;
                part[c] += factor;
                product[c] += factor * apart;
            }
        }
        for (int64_t c = 0; c < number; c++) {
            sum[c] += part[c];
            products[c] += product[c];
        }
    }
}

static void OF_TYPE(add_columns)(
    const VALUE *x, const VALUE *g, const VALUE *about, int64_t rows, int64_t width, int64_t number, double *sum,
    double *products) {
    if (number < COLUMNS) {
        OF_TYPE(add_columns_of)(x, g, about, rows, width, number, sum, products);
    } else if (g) {
        OF_TYPE(add_columns_of)(x, g, about, rows, width, COLUMNS, sum, products);
    } else {
        OF_TYPE(add_columns_of)(x, 0, about, rows, width, COLUMNS, sum, products);
    }
}

/* By differences from a first value; where that is far from the mean, once more by differences from about the mean. */
static void OF_TYPE(statistics_of_columns)(const VALUE *x, int64_t rows, int64_t channels, VALUE *mean) {
    VALUE *variance = mean + channels;
    for (int64_t first = 0; first < channels; first += COLUMNS) {
        int64_t number = least(COLUMNS, channels - first);
        VALUE about[COLUMNS];
        for (int64_t c = 0; c < number; c++) about[c] = x[first + c];
        for (int again = 1; again >= 0; again--) {
            double sums[COLUMNS] = {0}, squares[COLUMNS] = {0};
            int far = 0;
            OF_TYPE(add_columns)(x + first, 0, about, rows, channels, number, sums, squares);
            for (int64_t c = 0; c < number; c++) {
                double rest = sums[c] / rows, apart = squares[c] / rows - rest * rest;
                mean[first + c] = about[c] + rest;
                variance[first + c] = apart > 0 ? apart : 0;
                far |= rest * rest > FAR * apart;
            }
            if (!far) break;
            for (int64_t c = 0; c < number; c++) about[c] = mean[first + c];
        }
    }
}

/* The mean and the variance of each channel, (2, channels), by differences from about the mean. */
void OF_TYPE(statistics)(const VALUE *x, int64_t samples, int64_t channels, int64_t size, VALUE *mean) {
    if (size == 1) {
        OF_TYPE(statistics_of_columns)(x, samples, channels, mean);
        return;
    }
    VALUE *variance = mean + channels;
    int64_t together = channels_together(channels, size);
    for (int64_t first = 0; first < channels; first += together) {
        int64_t number = least(together, channels - first);
        double sums[STRETCH], squares[STRETCH];
        VALUE about[STRETCH];
        for (int64_t c = 0; c < number; c++) sums[c] = 0;
        for (int64_t n = 0; n < samples; n++) {
            const VALUE *rows = x + (n * channels + first) * size;
            for (int64_t c = 0; c < number; c++) sums[c] += OF_TYPE(sum)(rows + c * size, size);
        }
        double count = (double)samples * size;
        for (int64_t c = 0; c < number; c++) {
            about[c] = sums[c] / count;
            sums[c] = squares[c] = 0;
        }
        for (int64_t n = 0; n < samples; n++) {
            const VALUE *rows = x + (n * channels + first) * size;
            for (int64_t c = 0; c < number; c++)
                OF_TYPE(add_squares)(rows + c * size, about[c], size, &sums[c], &squares[c]);
        }
        for (int64_t c = 0; c < number; c++) {
            double rest = sums[c] / count;
            mean[first + c] = about[c] + rest;
            double apart = squares[c] / count - rest * rest;
            variance[first + c] = apart > 0 ? apart : 0;
        }
    }
}

/* From the means and variances of each rank, (ranks, 2, channels), and the share of the values that it has: mean,
 * variance and scale of all of them, and the running statistics of before, if there are any, brought up to date:
 * (5, channels). Ranks that do without this code do the same step by step: all have to get the same numbers.
 */
void OF_TYPE(merge)(
    const VALUE *of_ranks, const double *shares, int64_t ranks, int64_t channels, double values, double eps,
    const VALUE *running, const VALUE *running_variance, double momentum, VALUE *merged) {
    int64_t known = 0;
    while (known < ranks - 1 && shares[known] == 0) known++;
    for (int64_t c = 0; c < channels; c++) {
        double base = of_ranks[2 * known * channels + c], mean = 0, variance = 0;
        for (int64_t r = 0; r < ranks; r++) mean += shares[r] * (of_ranks[2 * r * channels + c] - base);
        mean += base;
        for (int64_t r = 0; r < ranks; r++) {
            double apart = of_ranks[2 * r * channels + c] - mean;
            variance += shares[r] * (of_ranks[(2 * r + 1) * channels + c] + apart * apart);
        }
        merged[c] = mean;
        merged[channels + c] = variance;
        merged[2 * channels + c] = 1 / sqrt(variance + eps);
        if (running) {
            double before = running[c], before_variance = running_variance[c];
            merged[3 * channels + c] = before + momentum * (mean - before);
            double unbiased = variance * values / (values - 1);
            merged[4 * channels + c] = before_variance + momentum * (unbiased - before_variance);
        }
    }
}

/* (x − mean) · scale · weight + bias, with the statistics that are `merged`. */
static void OF_TYPE(normalise)(
    const VALUE *x, int64_t samples, int64_t channels, int64_t size, const VALUE *merged, const VALUE *weight,
    const VALUE *bias, VALUE *restrict y) {
    const VALUE *mean = merged, *scale = merged + 2 * channels;
    if (size == 1) {
        VALUE factor[COLUMNS], shift[COLUMNS], about[COLUMNS];
        for (int64_t first = 0; first < channels; first += COLUMNS) {
            int64_t number = least(COLUMNS, channels - first);
            for (int64_t c = 0; c < number; c++) {
                factor[c] = weight ? scale[first + c] * weight[first + c] : scale[first + c];
                shift[c] = bias ? bias[first + c] : 0;
                about[c] = mean[first + c];
            }
            for (int64_t n = 0; n < samples; n++) {
                const VALUE *row = x + n * channels + first;
                VALUE *restrict to = y + n * channels + first;
                for (int64_t c = 0; c < number; c++) to[c] = (row[c] - about[c]) * factor[c] + shift[c];
            }
        }
        return;
    }
    for (int64_t n = 0; n < samples; n++) {
        for (int64_t c = 0; c < channels; c++) {
            VALUE factor = weight ? scale[c] * weight[c] : scale[c], shift = bias ? bias[c] : 0, about = mean[c];
            const VALUE *row = x + (n * channels + c) * size;
            VALUE *restrict to = y + (n * channels + c) * size;
            for (int64_t i = 0; i < size; i++) to[i] = (row[i] - about) * factor + shift;
        }
    }
}

/* Merges and normalises. */
void OF_TYPE(result)(
    const VALUE *x, int64_t samples, int64_t channels, int64_t size, const VALUE *of_ranks, const double *shares,
    int64_t ranks, double values, double eps, const VALUE *running, const VALUE *running_variance, double momentum,
    const VALUE *weight, const VALUE *bias, VALUE *merged, VALUE *y) {
    OF_TYPE(merge)(of_ranks, shares, ranks, channels, values, eps, running, running_variance, momentum, merged);
    OF_TYPE(normalise)(x, samples, channels, size, merged, weight, bias, y);
}

/* For each channel the sums of gradient · (x − mean) · scale and of the gradient: (2, channels), and the same again. */
void OF_TYPE(gradient_sums)(
    const VALUE *x, const VALUE *gradient, int64_t samples, int64_t channels, int64_t size, const VALUE *merged,
    VALUE *sums) {
    const VALUE *mean = merged, *scale = merged + 2 * channels;
    int64_t together = size == 1 ? COLUMNS : channels_together(channels, size);
    for (int64_t first = 0; first < channels; first += together) {
        int64_t number = least(together, channels - first);
        double sum[STRETCH], product[STRETCH];
        for (int64_t c = 0; c < number; c++) sum[c] = product[c] = 0;
        if (size == 1) {
            OF_TYPE(add_columns)(x + first, gradient + first, mean + first, samples, channels, number, sum, product);
        } else {
            for (int64_t n = 0; n < samples; n++) {
                int64_t at = (n * channels + first) * size;
                for (int64_t c = 0; c < number; c++, at += size)
                    OF_TYPE(add_products)(x + at, gradient + at, mean[first + c], size, &sum[c], &product[c]);
            }
        }
        for (int64_t c = 0; c < number; c++) {
            VALUE *to = sums + first + c;
            to[0] = to[2 * channels] = product[c] * scale[first + c];
            to[channels] = to[3 * channels] = sum[c];
        }
    }
}

/* scale · weight · (gradient − sum / values − (x − mean) · scale · product / values). */
void OF_TYPE(gradient)(
    const VALUE *x, const VALUE *gradient, int64_t samples, int64_t channels, int64_t size, const VALUE *merged,
    const VALUE *weight, const VALUE *totals, double values, VALUE *restrict d_x) {
    const VALUE *mean = merged, *scale = merged + 2 * channels;
    if (size == 1) {
        VALUE factor[COLUMNS], slope[COLUMNS], shift[COLUMNS], about[COLUMNS];
        for (int64_t first = 0; first < channels; first += COLUMNS) {
            int64_t number = least(COLUMNS, channels - first);
            for (int64_t c = 0; c < number; c++) {
                int64_t at = first + c;
                factor[c] = weight ? scale[at] * weight[at] : scale[at];
                slope[c] = factor[c] * scale[at] * (totals[at] / values);
                shift[c] = factor[c] * (totals[channels + at] / values);
                about[c] = mean[at];
            }
            for (int64_t n = 0; n < samples; n++) {
                int64_t at = n * channels + first;
                const VALUE *row = x + at, *given = gradient + at;
                VALUE *restrict to = d_x + at;
                for (int64_t c = 0; c < number; c++)
                    to[c] = given[c] * factor[c] - (row[c] - about[c]) * slope[c] - shift[c];
            }
        }
        return;
    }
    for (int64_t n = 0; n < samples; n++) {
        for (int64_t c = 0; c < channels; c++) {
            VALUE factor = weight ? scale[c] * weight[c] : scale[c], about = mean[c];
            VALUE slope = factor * scale[c] * (totals[c] / values), shift = factor * (totals[channels + c] / values);
            int64_t at = (n * channels + c) * size;
            const VALUE *row = x + at, *given = gradient + at;
            VALUE *restrict to = d_x + at;
            for (int64_t i = 0; i < size; i++) to[i] = given[i] * factor - (row[i] - about) * slope - shift;
        }
    }
}

#endif
