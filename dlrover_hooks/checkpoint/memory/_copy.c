/* Many copies in one call, without the GIL, by streaming stores (optional; `memcpy.py` does the same in Python).
 *
 * The copied bytes are read by another process, much later. Stores past the caches avoid reading the destination first
 * (about a third of the traffic) and leave the caches to the trainer. The C library does that only above a size of
 * several MB. The source is not needed again soon, either, so it is prefetched past the caches, too, one page ahead,
 * where the hardware's prefetching ends: a sixth faster, and a concurrent step loses 1 ms instead of 5 (500 MB, AMD
 * EPYC). `fetch` reads in that way to hash during a step. Stable ABI: one build serves all Pythons from 3.10.
 */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#define ALONE 1024 /* bytes; below, alignment costs more than it saves */
#define AHEAD 4096 /* bytes; harmless past the end of the source */

static void stream(char *to, const char *from, size_t size) {
    if (size < ALONE) {
        memcpy(to, from, size);
        return;
    }
    size_t head = -(uintptr_t)to & 63;
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= 64; to += 64, from += 64, size -= 64) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
        const __m128i *in = (const __m128i *)from;
        __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
        __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
        __m128i *out = (__m128i *)to;
        _mm_stream_si128(out, a), _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c), _mm_stream_si128(out + 3, d);
    }
    memcpy(to, from, size);
}
#define FENCE() _mm_sfence()

/* fetch(to, from, size): addresses. Reads past the caches and leaves the copy in them, without the GIL. */
static PyObject *fetch(PyObject *self, PyObject *args) {
    unsigned long long target, source, size;
    if (!PyArg_ParseTuple(args, "KKK", &target, &source, &size))
        return NULL;
    char *to = (char *)(uintptr_t)target;
    const char *from = (const char *)(uintptr_t)source;
    Py_BEGIN_ALLOW_THREADS
    for (; size >= 64; to += 64, from += 64, size -= 64) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
        memcpy(to, from, 64);
    }
    memcpy(to, from, size);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
#define FETCH {"fetch", fetch, METH_VARARGS, NULL},
#else
#define FETCH
#define stream memcpy
#define FENCE()
#endif

/* copy(base, offsets, sources, sizes, edges, shares, taken): for each i, sizes[i] bytes from sources[i] to
 * base + offsets[i], by as many threads as call it. Share k is edges[k] to edges[k + 1]. A thread takes the next share
 * by incrementing `taken`, without the GIL, which another thread may hold for long. All but base and shares are arrays
 * of uint64, given by address; the caller keeps them alive. */
static PyObject *copy(PyObject *self, PyObject *args) {
    unsigned long long base, offsets, sources, sizes, edges, shares, taken;
    if (!PyArg_ParseTuple(args, "KKKKKKK", &base, &offsets, &sources, &sizes, &edges, &shares, &taken))
        return NULL;
    const uint64_t *to = (const uint64_t *)(uintptr_t)offsets;
    const uint64_t *from = (const uint64_t *)(uintptr_t)sources;
    const uint64_t *size = (const uint64_t *)(uintptr_t)sizes;
    const uint64_t *edge = (const uint64_t *)(uintptr_t)edges;
    uint64_t *next = (uint64_t *)(uintptr_t)taken, share;
    Py_BEGIN_ALLOW_THREADS
    while ((share = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < shares)
        for (uint64_t i = edge[share]; i < edge[share + 1]; i++)
            stream((char *)(uintptr_t)(base + to[i]), (const char *)(uintptr_t)from[i], size[i]);
    FENCE();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"copy", copy, METH_VARARGS, NULL}, FETCH {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void) { return PyModule_Create(&module); }
