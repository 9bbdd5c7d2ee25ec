/* Runs every function of the library on the cases of a file and compares what it wrote with what
   the file expects, element by element, the gaps between elements included.

   usage: check FILE. The name of each function that ran goes to stdout, mistakes to stderr. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bedstone.h"

#define MAX_TENSORS 4
#define NAME_BYTES 48
#define SETTING_BYTES 128

typedef struct {
    char name[NAME_BYTES];
    double alpha, beta, tolerance;
    int64_t numbers[2]; /* enumerations among the arguments */
    int64_t threads, tensors;
    char setting[SETTING_BYTES]; /* a bs_convolution, bs_pooling or bs_activation */
} Case;

typedef struct {
    bs_tensor desc;
    int64_t elements, origin;
    char *memory, *data;
} Operand;

static int mistakes = 0;

static void mistake(const char *name, const char *what)
{
    fprintf(stderr, "%s: %s\n", name, what);
    mistakes++;
}

static void need(const char *name, int status)
{
    if (status != BS_SUCCESS)
        mistake(name, bs_status_string(status));
}

static void take(void *to, size_t bytes, FILE *file)
{
    if (bytes && fread(to, 1, bytes, file) != bytes) {
        fprintf(stderr, "the file of cases ends too early\n");
        exit(2);
    }
}

static size_t item(const Operand *operand)
{
    return operand->desc.dtype == BS_FLOAT32 ? 4 : 8;
}

static int is(const Case *c, const char *name)
{
    return strcmp(c->name, name) == 0;
}

/* Calls a convolution with a workspace of exactly the size that it asks for. */
static int convolve(const Case *c, Operand *t, const void *bias)
{
    const bs_convolution *conv = (const bs_convolution *)c->setting;
    int direction = is(c, "bs_convolution_forward") ? BS_FORWARD
        : is(c, "bs_convolution_backward_data")     ? BS_BACKWARD_DATA
                                                    : BS_BACKWARD_FILTER;
    /* The tensors in the order x, w, y. */
    const int order[3][3] = {{0, 1, 2}, {2, 0, 1}, {0, 2, 1}};
    const bs_tensor *x = &t[order[direction][0]].desc, *w = &t[order[direction][1]].desc;
    const bs_tensor *y = &t[order[direction][2]].desc;
    int64_t dims[BS_MAX_RANK];
    size_t bytes = 0;
    int threads = (int)c->threads, status, axis;
    void *workspace;

    need("bs_convolution_output_dims", bs_convolution_output_dims(conv, x, w, dims));
    for (axis = 0; axis < y->rank; axis++)
        if (dims[axis] != y->dims[axis])
            mistake("bs_convolution_output_dims", "other dims than expected");
    need("bs_convolution_workspace_size",
        bs_convolution_workspace_size(direction, conv, x, w, y, threads, &bytes));
    workspace = malloc(bytes);
    if (direction == BS_FORWARD)
        status = bs_convolution_forward(conv, c->alpha, x, t[0].data, w, t[1].data, bias, c->beta,
            y, t[2].data, workspace, bytes, threads);
    else if (direction == BS_BACKWARD_DATA)
        status = bs_convolution_backward_data(conv, c->alpha, w, t[0].data, y, t[1].data, c->beta,
            x, t[2].data, workspace, bytes, threads);
    else
        status = bs_convolution_backward_filter(conv, c->alpha, x, t[0].data, y, t[1].data,
            c->beta, w, t[2].data, workspace, bytes, threads);
    free(workspace);
    return status;
}

static int call(const Case *c, Operand *t)
{
    int n = (int)c->threads;
    const bs_tensor *a = &t[0].desc, *b = &t[1].desc, *d = &t[2].desc;

    if (is(c, "bs_convolution_backward_bias"))
        return bs_convolution_backward_bias(c->alpha, a, t[0].data, c->beta, b, t[1].data, n);
    if (strncmp(c->name, "bs_convolution", 14) == 0) {
        const void *bias = NULL;
        if (c->tensors == 4) { /* x, w, bias, y */
            Operand swapped = t[2];
            bias = swapped.data;
            t[2] = t[3];
            t[3] = swapped;
        }
        return convolve(c, t, bias);
    }
    if (strncmp(c->name, "bs_pooling", 10) == 0) {
        const bs_pooling *pool = (const bs_pooling *)c->setting;
        int64_t dims[BS_MAX_RANK];
        const bs_tensor *x = is(c, "bs_pooling_forward") ? a : &t[c->tensors - 1].desc;
        need("bs_pooling_output_dims", bs_pooling_output_dims(pool, x, BS_ROUND_FLOOR, dims));
        if (is(c, "bs_pooling_forward"))
            return bs_pooling_forward(pool, c->alpha, a, t[0].data, c->beta, b, t[1].data, n);
        if (c->tensors == 2)
            return bs_pooling_backward(
                pool, c->alpha, NULL, NULL, a, t[0].data, c->beta, b, t[1].data, n);
        return bs_pooling_backward(
            pool, c->alpha, a, t[0].data, b, t[1].data, c->beta, d, t[2].data, n);
    }
    if (is(c, "bs_softmax_forward"))
        return bs_softmax_forward((int)c->numbers[0], (int)c->numbers[1], c->alpha, a, t[0].data,
            c->beta, b, t[1].data, n);
    if (is(c, "bs_softmax_backward"))
        return bs_softmax_backward((int)c->numbers[0], (int)c->numbers[1], c->alpha, a, t[0].data,
            b, t[1].data, c->beta, d, t[2].data, n);
    if (is(c, "bs_activation_forward"))
        return bs_activation_forward((const bs_activation *)c->setting, c->alpha, a, t[0].data,
            c->beta, b, t[1].data, n);
    if (is(c, "bs_activation_backward"))
        return bs_activation_backward((const bs_activation *)c->setting, c->alpha, a, t[0].data,
            b, t[1].data, c->beta, d, t[2].data, n);
    if (is(c, "bs_tensor_transform"))
        return bs_tensor_transform(c->alpha, a, t[0].data, c->beta, b, t[1].data, n);
    if (is(c, "bs_tensor_add"))
        return bs_tensor_add(c->alpha, a, t[0].data, c->beta, b, t[1].data, n);
    if (is(c, "bs_tensor_set"))
        return bs_tensor_set(c->alpha, c->beta, a, t[0].data, n);
    if (is(c, "bs_tensor_scale"))
        return bs_tensor_scale(c->alpha, a, t[0].data, n);
    mistake(c->name, "this program does not know the function");
    return BS_SUCCESS;
}

/* `tolerance` is relative to the larger of 1 and the value expected. */
static void compare(const Case *c, const Operand *out, const double *expected)
{
    int64_t i, wrong = 0;
    for (i = 0; i < out->elements; i++) {
        double got = item(out) == 4 ? ((float *)out->memory)[i] : ((double *)out->memory)[i];
        double most = c->tolerance * fmax(1.0, fabs(expected[i]));
        if (!(fabs(got - expected[i]) <= most) && wrong++ == 0)
            fprintf(stderr, "%s: element %ld is %.9g, expected %.9g\n", c->name, (long)i, got,
                expected[i]);
    }
    if (wrong)
        mistake(c->name, "wrong values");
}

/* Functions without tensors' data, and answers to bad arguments. */
static void check_the_others(void)
{
    int64_t dims[3] = {2, 3, 4}, many[BS_MAX_RANK + 1] = {0};
    bs_tensor t;
    float values[24];
    int status;

    if (strlen(bs_version()) < 3)
        mistake("bs_version", "no version");
    for (status = -1; status <= BS_SMALL_WORKSPACE + 1; status++)
        if (strlen(bs_status_string(status)) < 3)
            mistake("bs_status_string", "no sentence");
    need("bs_set_num_threads", bs_set_num_threads(3));
    if (bs_get_num_threads() != 3)
        mistake("bs_get_num_threads", "not what was set");
    if (bs_set_num_threads(-1) != BS_BAD_THREADS)
        mistake("bs_set_num_threads", "took -1");
    need("bs_set_num_threads", bs_set_num_threads(0));
    if (bs_get_num_threads() < 1)
        mistake("bs_get_num_threads", "none");
    need("bs_tensor_init", bs_tensor_init(&t, BS_FLOAT32, 3, dims, NULL));
    if (t.strides[0] != 12 || t.strides[1] != 4 || t.strides[2] != 1)
        mistake("bs_tensor_init", "strides are not row-major");
    need("bs_tensor_set", bs_tensor_set(1.0, 0.0, &t, values, 0));
    if (values[0] != 1.0f || values[23] != 1.0f)
        mistake("bs_tensor_set", "did not set");
    if (bs_tensor_init(&t, 7, 3, dims, NULL) != BS_BAD_DTYPE)
        mistake("bs_tensor_init", "took a bad dtype");
    if (bs_tensor_init(&t, BS_FLOAT32, BS_MAX_RANK + 1, many, NULL) != BS_BAD_RANK)
        mistake("bs_tensor_init", "took a bad rank");
    if (bs_tensor_init(NULL, BS_FLOAT32, 3, dims, NULL) != BS_NULL_POINTER)
        mistake("bs_tensor_init", "took null");
}

int main(int count, char **words)
{
    static const char *others[] = {"bs_version", "bs_status_string", "bs_set_num_threads",
        "bs_get_num_threads", "bs_tensor_init", "bs_convolution_output_dims",
        "bs_convolution_workspace_size", "bs_pooling_output_dims"};
    FILE *file = count == 2 ? fopen(words[1], "rb") : NULL;
    int64_t cases, number, i;

    if (file == NULL) {
        fprintf(stderr, "usage: check FILE\n");
        return 2;
    }
    check_the_others();
    take(&cases, sizeof cases, file);
    for (number = 0; number < cases; number++) {
        Case c;
        Operand t[MAX_TENSORS];
        Operand out;
        double *expected;
        take(&c, sizeof c, file);
        for (i = 0; i < c.tensors; i++) {
            take(&t[i].desc, sizeof t[i].desc, file);
            take(&t[i].elements, sizeof t[i].elements, file);
            take(&t[i].origin, sizeof t[i].origin, file);
            t[i].memory = malloc(item(&t[i]) * (size_t)t[i].elements);
            take(t[i].memory, item(&t[i]) * (size_t)t[i].elements, file);
            t[i].data = t[i].memory + (int64_t)item(&t[i]) * t[i].origin;
        }
        out = t[c.tensors - 1];
        expected = malloc(sizeof(double) * (size_t)out.elements);
        take(expected, sizeof(double) * (size_t)out.elements, file);
        need(c.name, call(&c, t));
        compare(&c, &out, expected);
        printf("%s\n", c.name);
        free(expected);
        for (i = 0; i < c.tensors; i++)
            free(t[i].memory);
    }
    fclose(file);
    for (i = 0; i < (int64_t)(sizeof others / sizeof *others); i++)
        printf("%s\n", others[i]);
    return mistakes ? 1 : 0;
}
