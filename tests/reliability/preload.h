/* What every preloaded library has: the directory that it watches, and a way to the calls behind its own. */
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

static char root[PATH_MAX];
static size_t root_length;
/* Not every library uses these. */
__attribute__((unused)) static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
__attribute__((unused)) static __thread int inside;

#define REAL(name, ...) ((__typeof__(&name))real(#name))(__VA_ARGS__)

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}
