/* Preloaded before libc: counts the calls that read a file system below one directory, and fails the n-th.
 *
 * Reads of mapped memory are none of them. Unarmed, every call passes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "preload.h"

static atomic_long calls;
static long at;
static int armed, failure;

void reads_arm(const char *directory, long n, int error) {
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    calls = 0;
    at = n, failure = error, armed = 1;
}

long reads_disarm(void) {
    armed = 0;
    return calls;
}

static int below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int is_watched(int fd) {
    char link[64], path[PATH_MAX];
    if (!armed || fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int saved = errno;
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    path[length < 0 ? 0 : length] = 0;
    return below(path);
}

static int is_name_watched(int folder, const char *path) {
    if (!armed) return 0;
    return *path == '/' || folder == AT_FDCWD ? below(path) : is_watched(folder);
}

/* Whether this is the call that fails; errno is set. */
static int fails(int watched) {
    if (!watched || atomic_fetch_add(&calls, 1) + 1 != at) return 0;
    errno = failure;
    return 1;
}

#define CALL(type, refused, name, parameters, watched, ...) \
    type name parameters { return fails(watched) ? (refused) : REAL(name, __VA_ARGS__); }
#define OF_FILE(type, name, parameters, ...) CALL(type, -1, name, parameters, is_watched(fd), __VA_ARGS__)
#define OF_NAME(name, parameters, folder, ...) CALL(int, -1, name, parameters, is_name_watched(folder, path), __VA_ARGS__)

OF_FILE(ssize_t, read, (int fd, void *data, size_t size), fd, data, size)
OF_FILE(ssize_t, readv, (int fd, const struct iovec *data, int pieces), fd, data, pieces)
OF_FILE(ssize_t, pread, (int fd, void *data, size_t size, off_t offset), fd, data, size, offset)
OF_FILE(ssize_t, pread64, (int fd, void *data, size_t size, off64_t offset), fd, data, size, offset)
OF_FILE(ssize_t, preadv, (int fd, const struct iovec *data, int pieces, off_t offset), fd, data, pieces, offset)
OF_FILE(ssize_t, preadv64, (int fd, const struct iovec *data, int pieces, off64_t offset), fd, data, pieces, offset)
OF_FILE(ssize_t, preadv2, (int fd, const struct iovec *data, int pieces, off_t offset, int flags), fd, data, pieces, offset, flags)
OF_FILE(ssize_t, preadv64v2, (int fd, const struct iovec *data, int pieces, off64_t offset, int flags), fd, data, pieces, offset, flags)
OF_FILE(ssize_t, fgetxattr, (int fd, const char *name, void *value, size_t size), fd, name, value, size)
OF_FILE(int, fstat, (int fd, struct stat *status), fd, status)
OF_FILE(int, fstat64, (int fd, struct stat64 *status), fd, status)
OF_NAME(stat, (const char *path, struct stat *status), AT_FDCWD, path, status)
OF_NAME(stat64, (const char *path, struct stat64 *status), AT_FDCWD, path, status)
OF_NAME(lstat, (const char *path, struct stat *status), AT_FDCWD, path, status)
OF_NAME(lstat64, (const char *path, struct stat64 *status), AT_FDCWD, path, status)
OF_NAME(fstatat, (int fd, const char *path, struct stat *status, int flags), fd, fd, path, status, flags)
OF_NAME(fstatat64, (int fd, const char *path, struct stat64 *status, int flags), fd, fd, path, status, flags)
OF_NAME(statx, (int fd, const char *path, int flags, unsigned mask, struct statx *status), fd, fd, path, flags, mask, status)
CALL(DIR *, NULL, opendir, (const char *path), is_name_watched(AT_FDCWD, path), path)
CALL(struct dirent *, NULL, readdir, (DIR *list), is_watched(dirfd(list)), list)
CALL(struct dirent64 *, NULL, readdir64, (DIR *list), is_watched(dirfd(list)), list)

static int opened(int folder, const char *path, int flags, mode_t mode) {
    return fails(is_name_watched(folder, path)) ? -1 : REAL(openat, folder, path, flags, mode);
}

#define OPEN(name, parameters, folder)          \
    int name parameters {                       \
        mode_t mode = 0;                        \
        if (flags & (O_CREAT | O_TMPFILE)) {    \
            va_list list;                       \
            va_start(list, flags);              \
            mode = va_arg(list, mode_t);        \
            va_end(list);                       \
        }                                       \
        return opened(folder, path, flags, mode); \
    }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD)
OPEN(openat, (int folder, const char *path, int flags, ...), folder)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder)
