/* Preloaded behind shim.c: the rules of NFS below one directory, for file systems that have none of them.
 *
 * No two names are exchanged (EINVAL), no attributes (ENOTSUP), no preallocation, no directory is synced (EINVAL).
 * What is removed or replaced while somebody has it open is either renamed to `.nfs...` and stays until its last close
 * (an unlink of that: EBUSY), as where both are of one machine; or reading on gives ESTALE, as where another machine
 * removed it. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "preload.h"

enum { OFF, ONE_MACHINE, OTHER_MACHINE };

static int rules;
static struct silly { struct silly *next; char path[]; } *sillies; /* renamed by this process */

void network_rules(const char *directory, int which) {
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    rules = which;
}

static int below(const char *path) {
    return rules && !inside && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static char *path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = rules ? readlink(link, out, PATH_MAX - 1) : -1;
    out[length < 0 ? 0 : length] = 0;
    return out;
}

static char *absolute(int folder, const char *path, char *out) {
    char base[PATH_MAX] = "";
    if (*path != '/' && folder != AT_FDCWD) path_of(folder, base);
    if (*path != '/' && folder == AT_FDCWD && !getcwd(base, sizeof base)) *base = 0;
    if (snprintf(out, PATH_MAX, "%s%s%s", base, *path == '/' ? "" : "/", path) >= PATH_MAX) *out = 0;
    return out;
}

#define REFUSE(condition, number) \
    if (condition) return errno = (number), -1

/* ---- what is open stays, under another name ---- */

static int maps(const char *pid, const struct stat *file) {
    char name[300], line[PATH_MAX];
    unsigned first, second;
    unsigned long inode;
    int found = 0;
    snprintf(name, sizeof name, "/proc/%s/maps", pid);
    FILE *list = fopen(name, "re");
    while (list && !found && fgets(line, sizeof line, list))
        found = sscanf(line, "%*s %*s %*s %x:%x %lu", &first, &second, &inode) == 3 && inode == file->st_ino &&
                makedev(first, second) == file->st_dev;
    if (list) fclose(list);
    return found;
}

static int holds(const char *pid, const struct stat *file) {
    char name[600];
    struct stat one;
    int found = 0;
    snprintf(name, sizeof name, "/proc/%s/fd", pid);
    DIR *list = opendir(name);
    for (struct dirent *entry; list && !found && (entry = readdir(list));) {
        snprintf(name, sizeof name, "/proc/%s/fd/%s", pid, entry->d_name);
        found = isdigit(*entry->d_name) && !stat(name, &one) && one.st_ino == file->st_ino && one.st_dev == file->st_dev;
    }
    if (list) closedir(list);
    return found || maps(pid, file);
}

/* Whether a process of this group has a file open or mapped. */
static int in_use(const char *path) {
    struct stat file;
    if (lstat(path, &file) || !S_ISREG(file.st_mode)) return 0;
    DIR *list = opendir("/proc");
    int found = 0;
    for (struct dirent *entry; list && !found && (entry = readdir(list));)
        found = isdigit(*entry->d_name) && getpgid(atoi(entry->d_name)) == getpgrp() && holds(entry->d_name, &file);
    if (list) closedir(list);
    return found;
}

static int is_silly(const char *path) {
    const char *name = strrchr(path, '/');
    return name && !strncmp(name, "/.nfs", 5);
}

static int rename_silly(const char *path) {
    static unsigned count;
    struct silly *new = malloc(sizeof *new + strlen(path) + 40);
    int length = strrchr(path, '/') - path;
    sprintf(new->path, "%.*s/.nfs%08x%08x", length, path, getpid(), ++count);
    if (REAL(renameat2, AT_FDCWD, path, AT_FDCWD, new->path, 0)) return free(new), -1;
    pthread_mutex_lock(&lock);
    new->next = sillies, sillies = new;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Remove what nobody has open any more. */
static void sweep(void) {
    if (!sillies || inside) return;
    int saved = errno;
    pthread_mutex_lock(&lock);
    inside = 1;
    for (struct silly **at = &sillies; *at;) {
        struct silly *one = *at;
        if (in_use(one->path)) {
            at = &one->next;
        } else {
            REAL(unlinkat, AT_FDCWD, one->path, 0);
            *at = one->next;
            free(one);
        }
    }
    inside = 0;
    pthread_mutex_unlock(&lock);
    errno = saved;
}

int close(int fd) {
    int result = REAL(close, fd);
    sweep();
    return result;
}
int munmap(void *address, size_t length) {
    int result = REAL(munmap, address, length);
    sweep();
    return result;
}

int unlinkat(int folder, const char *path, int flags) {
    char full[PATH_MAX];
    if (rules != ONE_MACHINE || flags & AT_REMOVEDIR || !below(absolute(folder, path, full)) || !in_use(full))
        return REAL(unlinkat, folder, path, flags);
    REFUSE(is_silly(full), EBUSY);
    return rename_silly(full);
}
int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char full[PATH_MAX];
    int seen = rules && below(absolute(to_folder, to, full));
    REFUSE(seen && flags, EINVAL);
    if (seen && rules == ONE_MACHINE && in_use(full) && rename_silly(full)) return -1;
    return REAL(renameat2, from_folder, from, to_folder, to, flags);
}

/* ---- what another machine removed is stale ---- */

static int stale(int fd) {
    static const char removed[] = " (deleted)";
    char path[PATH_MAX];
    if (rules != OTHER_MACHINE || !below(path_of(fd, path))) return 0;
    size_t length = strlen(path), end = sizeof removed - 1;
    return length > end && !strcmp(path + length - end, removed);
}

ssize_t read(int fd, void *data, size_t size) { REFUSE(stale(fd), ESTALE); return REAL(read, fd, data, size); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { REFUSE(stale(fd), ESTALE); return REAL(pread, fd, data, size, at); }
ssize_t pread64(int fd, void *data, size_t size, off_t at) { return pread(fd, data, size, at); }
ssize_t preadv(int fd, const struct iovec *data, int pieces, off_t at) {
    REFUSE(stale(fd), ESTALE);
    return REAL(preadv, fd, data, pieces, at);
}
ssize_t preadv64(int fd, const struct iovec *data, int pieces, off_t at) { return preadv(fd, data, pieces, at); }
ssize_t preadv2(int fd, const struct iovec *data, int pieces, off_t at, int flags) {
    REFUSE(stale(fd), ESTALE);
    return REAL(preadv2, fd, data, pieces, at, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *data, int pieces, off_t at, int flags) { return preadv2(fd, data, pieces, at, flags); }
int fstat(int fd, struct stat *status) { REFUSE(stale(fd), ESTALE); return REAL(fstat, fd, status); }
int fstat64(int fd, struct stat64 *status) { return fstat(fd, (struct stat *)status); }
struct dirent *readdir(DIR *folder) {
    if (stale(dirfd(folder))) return errno = ESTALE, NULL;
    return REAL(readdir, folder);
}
struct dirent64 *readdir64(DIR *folder) { return (struct dirent64 *)readdir(folder); }

/* ---- what there is not ---- */

static int is_folder(int fd) {
    struct stat status;
    char path[PATH_MAX];
    return rules && !REAL(fstat, fd, &status) && S_ISDIR(status.st_mode) && below(path_of(fd, path));
}

int fsync(int fd) { REFUSE(is_folder(fd), EINVAL); return REAL(fsync, fd); }
/* The locks of a directory never reach the server; those of files are such of byte ranges, which need the right access. */
int flock(int fd, int operation) {
    char path[PATH_MAX];
    if (below(path_of(fd, path))) {
        int access = fcntl(fd, F_GETFL) & O_ACCMODE;
        REFUSE(is_folder(fd), EBADF);
        REFUSE(operation & LOCK_EX && access == O_RDONLY, EBADF);
        REFUSE(operation & LOCK_SH && access == O_WRONLY, EBADF);
    }
    return REAL(flock, fd, operation);
}

int fdatasync(int fd) { REFUSE(is_folder(fd), EINVAL); return REAL(fdatasync, fd); }
int fallocate(int fd, int mode, off_t at, off_t size) {
    char path[PATH_MAX];
    REFUSE(below(path_of(fd, path)), EOPNOTSUPP);
    return REAL(fallocate, fd, mode, at, size);
}

#define WITHOUT_ATTRIBUTES(type, name, parameters, find, ...)                       \
    type name parameters {                                                          \
        char full[PATH_MAX];                                                        \
        REFUSE(below(find), ENOTSUP);                                               \
        return REAL(name, __VA_ARGS__);                                             \
    }
#define HERE absolute(AT_FDCWD, path, full)
WITHOUT_ATTRIBUTES(int, fsetxattr, (int fd, const char *name, const void *value, size_t size, int flags), path_of(fd, full), fd, name, value, size, flags)
WITHOUT_ATTRIBUTES(int, setxattr, (const char *path, const char *name, const void *value, size_t size, int flags), HERE, path, name, value, size, flags)
WITHOUT_ATTRIBUTES(int, lsetxattr, (const char *path, const char *name, const void *value, size_t size, int flags), HERE, path, name, value, size, flags)
WITHOUT_ATTRIBUTES(ssize_t, fgetxattr, (int fd, const char *name, void *value, size_t size), path_of(fd, full), fd, name, value, size)
WITHOUT_ATTRIBUTES(ssize_t, getxattr, (const char *path, const char *name, void *value, size_t size), HERE, path, name, value, size)
WITHOUT_ATTRIBUTES(ssize_t, lgetxattr, (const char *path, const char *name, void *value, size_t size), HERE, path, name, value, size)
