/* Preloaded before libc: counts, kills at, fails and records the calls that change a file system below one directory.
 *
 * arm() chooses the directory and what happens at the n-th call; unarmed, every call passes. One lock is held from
 * before a call until it is recorded, over threads and (flock on the record) over processes, so that the order of
 * the record is the order of the calls. Python's ctypes and TensorStore reach libc by its dynamic symbols, as
 * CPython does; a test compares the count with what strace sees. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "preload.h"

enum { CREATE, WRITE, TRUNCATE, MKDIR, RMDIR, UNLINK, RENAME, EXCHANGE, LINK, SYMLINK, FSYNC, XATTR, MARK, HINT };
enum { PASS, KILL, FAIL, KILL_HALF, FULL };

static int armed, action, failure, record = -1;
static long at, calls;

/* ---- what the tests call ---- */

void shim_arm(const char *directory, long n, int what, int error, const char *log) {
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    at = n, action = what, failure = error, calls = 0;
    if (record >= 0) close(record);
    record = *log ? REAL(open, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666) : -1;
    armed = 1;
}

long shim_disarm(void) {
    armed = 0;
    return calls;
}

static void note(int op, uint64_t inode, int64_t a, int64_t b, const char *first, const char *second,
                 const struct iovec *data, int pieces, size_t size) {
    if (record < 0) return;
    struct { uint32_t op, pid; uint64_t inode; int64_t a, b; uint32_t first, second; uint64_t size; } head = {
        op, getpid(), inode, a, b, strlen(first), strlen(second), size};
    struct iovec parts[3] = {{&head, sizeof head}, {(void *)first, head.first}, {(void *)second, head.second}};
    REAL(writev, record, parts, 3);
    for (int i = 0; i < pieces && size; i++) {
        size_t length = data[i].iov_len < size ? data[i].iov_len : size;
        REAL(write, record, data[i].iov_base, length);
        size -= length;
    }
}

static void hold(void) {
    pthread_mutex_lock(&lock);
    inside = 1;
    if (record >= 0) flock(record, LOCK_EX);
}

static void release(void) {
    int saved = errno;
    if (record >= 0) flock(record, LOCK_UN);
    inside = 0;
    pthread_mutex_unlock(&lock);
    errno = saved;
}

void shim_mark(const char *text) {
    hold();
    note(MARK, 0, 0, 0, text, "", NULL, 0, 0);
    release();
}

/* ---- which calls count, and what becomes of the n-th ---- */

static void path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
}

static void absolute(int folder, const char *path, char *out) {
    char base[PATH_MAX];
    if (*path == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) *base = 0;
    } else {
        path_of(folder, base);
    }
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) *out = 0;
}

static int below(const char *path) {
    return armed && !inside && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* Whether to do the call: 1 yes, 0 no (errno is set), -1 half of it. Space is what a full disk lacks. */
static int begin(int needs_space) {
    hold();
    long n = ++calls;
    if (action == FULL && at && n >= at && needs_space) {
        errno = ENOSPC;
        return n == at && needs_space == 2 ? -1 : 0;
    }
    if (n != at) return 1;
    if (action == KILL) kill(getpid(), SIGKILL);
    if (action == KILL_HALF) {
        if (needs_space != 2) kill(getpid(), SIGKILL);
        return -1;
    }
    if (action == FAIL) {
        errno = failure;
        return 0;
    }
    return 1;
}

static uint64_t inode_of(int fd) {
    struct stat status;
    return fstat(fd, &status) ? 0 : status.st_ino;
}

#define REFUSED(result)      \
    do {                     \
        release();           \
        return (result);     \
    } while (0)

/* ---- files ---- */

static int opened(int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    int changes = flags & (O_CREAT | O_TRUNC);
    if (!changes || !armed || inside) return REAL(openat, folder, path, flags, mode);
    absolute(folder, path, full);
    struct stat status;
    int exists = !lstat(full, &status);
    if (!below(full)) return REAL(openat, folder, path, flags, mode);
    if (begin(!exists) != 1) REFUSED(-1);
    int fd = REAL(openat, folder, path, flags, mode);
    if (fd >= 0) note(!exists ? CREATE : flags & O_TRUNC ? TRUNCATE : HINT, inode_of(fd), 0, 0, full, "", NULL, 0, 0);
    release();
    return fd;
}

#define MODE                                  \
    mode_t mode = 0;                          \
    if (flags & (O_CREAT | O_TMPFILE)) {      \
        va_list list;                         \
        va_start(list, flags);                \
        mode = va_arg(list, mode_t);          \
        va_end(list);                         \
    }

int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_TRUNC | O_WRONLY, mode); }

/* All writes end here; a negative offset is the file's own. */
static ssize_t written(int fd, const struct iovec *data, int pieces, off_t offset) {
    char path[PATH_MAX];
    int own = offset < 0;
    if (armed && !inside) path_of(fd, path);
    if (!armed || inside || !below(path))
        return own ? REAL(writev, fd, data, pieces) : REAL(pwritev, fd, data, pieces, offset);
    int go = begin(2);
    if (!go) REFUSED(-1);
    struct iovec half = {data->iov_base, data->iov_len / 2};
    if (go < 0) data = &half, pieces = 1;
    ssize_t size = own ? REAL(writev, fd, data, pieces) : REAL(pwritev, fd, data, pieces, offset);
    if (go < 0 && action == KILL_HALF) kill(getpid(), SIGKILL);
    if (size > 0) note(WRITE, inode_of(fd), own ? lseek(fd, 0, SEEK_CUR) - size : offset, 0, path, "", data, pieces, size);
    release();
    return size;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!armed || inside) return REAL(write, fd, data, size);
    struct iovec piece = {(void *)data, size};
    return written(fd, &piece, 1, -1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct iovec piece = {(void *)data, size};
    return written(fd, &piece, 1, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }
ssize_t writev(int fd, const struct iovec *data, int pieces) { return written(fd, data, pieces, -1); }
ssize_t pwritev(int fd, const struct iovec *data, int pieces, off_t offset) { return written(fd, data, pieces, offset); }
ssize_t pwritev64(int fd, const struct iovec *data, int pieces, off_t offset) { return written(fd, data, pieces, offset); }
ssize_t pwritev2(int fd, const struct iovec *data, int pieces, off_t offset, int flags) { (void)flags; return written(fd, data, pieces, offset); }
ssize_t pwritev64v2(int fd, const struct iovec *data, int pieces, off_t offset, int flags) { (void)flags; return written(fd, data, pieces, offset); }

/* Copies inside the kernel are refused below the directory: Python then copies by read and write, which are seen. */
ssize_t copy_file_range(int in, off_t *from, int out, off_t *to, size_t size, unsigned flags) {
    char path[PATH_MAX];
    path_of(out, path);
    if (below(path)) return errno = EXDEV, -1;
    return REAL(copy_file_range, in, from, out, to, size, flags);
}
ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
    char path[PATH_MAX];
    path_of(out, path);
    if (below(path)) return errno = ENOTSOCK, -1;
    return ((ssize_t(*)(int, int, off_t *, size_t))real("sendfile"))(out, in, offset, size);
}
ssize_t sendfile64(int out, int in, off_t *offset, size_t size) { return sendfile(out, in, offset, size); }

/* A call about an open file. */
#define ON_FILE(op, space, fd, call, a)                                             \
    char path[PATH_MAX];                                                            \
    if (armed && !inside) path_of(fd, path);                                        \
    if (!armed || inside || !below(path)) return call;                              \
    if (begin(space) != 1) REFUSED(-1);                                             \
    int result = call;                                                              \
    if (!result) note(op, inode_of(fd), a, 0, path, "", NULL, 0, 0);                \
    release();                                                                      \
    return result;

int ftruncate(int fd, off_t size) { ON_FILE(TRUNCATE, 1, fd, REAL(ftruncate, fd, size), size) }
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int fsync(int fd) { ON_FILE(FSYNC, 0, fd, REAL(fsync, fd), 0) }
int fdatasync(int fd) { ON_FILE(FSYNC, 0, fd, REAL(fdatasync, fd), 0) }
int sync_file_range(int fd, off_t offset, off_t size, unsigned flags) {
    ON_FILE(HINT, 0, fd, REAL(sync_file_range, fd, offset, size, flags), 0)
}
int fallocate(int fd, int mode, off_t offset, off_t size) {
    ON_FILE(TRUNCATE, 1, fd, REAL(fallocate, fd, mode, offset, size), offset + size)
}
int fallocate64(int fd, int mode, off_t offset, off_t size) { return fallocate(fd, mode, offset, size); }

static int attribute(int fd, const char *path, const char *name, const void *value, size_t size, int flags) {
    struct iovec data = {(void *)value, size};
    char full[PATH_MAX] = "";
    if (armed && !inside) fd >= 0 ? path_of(fd, full) : absolute(AT_FDCWD, path, full);
    int seen = below(full);
    if (seen && begin(1) != 1) REFUSED(-1);
    int result = fd >= 0 ? ((int (*)(int, const char *, const void *, size_t, int))real("fsetxattr"))(fd, name, value, size, flags)
                         : ((int (*)(const char *, const char *, const void *, size_t, int))real("setxattr"))(path, name, value, size, flags);
    if (!seen) return result;
    struct stat status;
    if (!result && !stat(full, &status)) note(XATTR, status.st_ino, 0, 0, full, name, &data, 1, size);
    release();
    return result;
}
int fsetxattr(int fd, const char *name, const void *value, size_t size, int flags) { return attribute(fd, "", name, value, size, flags); }
int setxattr(const char *path, const char *name, const void *value, size_t size, int flags) { return attribute(-1, path, name, value, size, flags); }
int lsetxattr(const char *path, const char *name, const void *value, size_t size, int flags) { return attribute(-1, path, name, value, size, flags); }

/* ---- names ---- */

#define ON_NAMES(op, space, one, two, call)                                         \
    if (!below(one) && !below(two)) return call;                                    \
    if (begin(space) != 1) REFUSED(-1);                                             \
    int result = call;                                                              \
    if (!result) note(op, 0, 0, 0, one, two, NULL, 0, 0);                           \
    release();                                                                      \
    return result;

#define ONE(folder, path)                                                           \
    char one[PATH_MAX] = "";                                                        \
    if (armed && !inside) absolute(folder, path, one);

#define TWO(first_folder, first, second_folder, second)                             \
    ONE(first_folder, first)                                                        \
    char two[PATH_MAX] = "";                                                        \
    if (armed && !inside) absolute(second_folder, second, two);

int mkdirat(int folder, const char *path, mode_t mode) {
    ONE(folder, path) ON_NAMES(MKDIR, 1, one, "", REAL(mkdirat, folder, path, mode))
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int unlinkat(int folder, const char *path, int flags) {
    ONE(folder, path)
    ON_NAMES(flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, one, "", REAL(unlinkat, folder, path, flags))
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    struct stat status;
    return unlinkat(AT_FDCWD, path, !lstat(path, &status) && S_ISDIR(status.st_mode) ? AT_REMOVEDIR : 0);
}
int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    TWO(from_folder, from, to_folder, to)
    ON_NAMES(flags & 2 ? EXCHANGE : RENAME, 0, one, two, REAL(renameat2, from_folder, from, to_folder, to, flags))
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    return renameat2(from_folder, from, to_folder, to, 0);
}
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    TWO(from_folder, from, to_folder, to)
    ON_NAMES(LINK, 1, one, two, REAL(linkat, from_folder, from, to_folder, to, flags))
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
int symlinkat(const char *target, int folder, const char *path) {
    ONE(folder, path) ON_NAMES(SYMLINK, 1, one, target, REAL(symlinkat, target, folder, path))
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }
