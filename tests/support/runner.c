/* Runs one submission of a bundle on another machine than the one that prepared it: tests/support/emulated.py.

     runner EXECUTOR KERNELS JOB THREADS

   EXECUTOR and KERNELS are the bundle's libraries. JOB is a file of 64-bit words, mapped so that what kernels write
   stays in it:

     the header: how many words of code, kernel numbers in it, slots, parameters and states there are, and the bytes of
       a worker's scratch memory;
     the code, the places of kernel numbers in it, the slots (as bytes from the start of the file), the parameters;
     what the slots point to, at multiples of 64 bytes.
*/
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

typedef int64_t word;
enum { CODE, KERNELS, SLOTS, PARAMETERS, STATES, SCRATCH, HEADER };
/* The call block, as aotc/vmfb/abi.py counts its words. */
enum { CALL_POOL = 2, CALL_SLOTS, CALL_PARAMS, CALL_CELLS, CALL_STRIDE, CALL_SCRATCH, CALL_CODE, CALL_LENGTH,
       CALL_THREADS, CALL_WORDS = 24 };
enum { ALIGNMENT = 64, STATE_BYTES = 64 };

static void *library(const char *path) {
    void *found = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

static void *symbol(void *from, const char *name) {
    void *found = dlsym(from, name);
    if (!found) {
        fprintf(stderr, "no symbol %s\n", name);
        exit(1);
    }
    return found;
}

/* Memory as the runtime gives it: aligned, and here never 0, so that nobody relies on that. */
static void *memory(size_t bytes, int fill) {
    size_t whole = (bytes / ALIGNMENT + 1) * ALIGNMENT;
    void *found = aligned_alloc(ALIGNMENT, whole);
    if (!found) {
        perror("memory");
        exit(1);
    }
    return memset(found, fill, whole);
}

static char *map(const char *path) {
    struct stat about;
    int file = open(path, O_RDWR);
    char *found = MAP_FAILED;
    if (file >= 0 && fstat(file, &about) == 0)
        found = mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (found == MAP_FAILED) {
        perror(path);
        exit(1);
    }
    return found;
}

int main(int count, char **arguments) {
    if (count != 5) {
        fprintf(stderr, "runner EXECUTOR KERNELS JOB THREADS\n");
        return 1;
    }
    void *executor = library(arguments[1]);
    word **kernels = symbol(library(arguments[2]), "aotc_kernels");
    char *job = map(arguments[3]);
    word threads = atoi(arguments[4]);

    word *header = (word *)job;
    word *code = header + HEADER, *places = code + header[CODE];
    word *slots = places + header[KERNELS], *parameters = slots + header[SLOTS];
    for (word n = 0; n < header[KERNELS]; n++)
        code[places[n]] = (word)kernels[code[places[n]]];
    for (word n = 0; n < header[SLOTS]; n++)
        slots[n] += (word)job;

    word (*pool_bytes)(void) = symbol(executor, "aotc_pool_bytes");
    void (*stop)(word *) = symbol(executor, "aotc_pool_stop");
    word (*run)(word *) = symbol(executor, "aotc_run");

    word *pool = memory((size_t)pool_bytes(), 0);
    word *states = memory((size_t)header[STATES] * STATE_BYTES, 0xA5);
    char *scratch = memory((size_t)(header[SCRATCH] * threads), 0xA5);
    word *call = memory(CALL_WORDS * sizeof(word), 0);
    call[CALL_POOL] = (word)pool;
    call[CALL_SLOTS] = (word)slots;
    call[CALL_PARAMS] = (word)parameters;
    call[CALL_CELLS] = (word)states;
    call[CALL_STRIDE] = header[SCRATCH];
    call[CALL_SCRATCH] = (word)&scratch;
    call[CALL_CODE] = (word)code;
    call[CALL_LENGTH] = header[CODE];
    call[CALL_THREADS] = threads;
    word failed = run(call);
    stop(pool);
    return failed ? 1 : 0;
}
