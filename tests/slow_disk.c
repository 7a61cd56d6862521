/* A slow or failing disk, for one process: preloaded, file calls on paths below $DISK are counted and delayed.

The file $DISK_CONTROL says how: "SECONDS ERRNO", an error for writing calls, or 0 for none. Each call on the
thread with the id $DISK_THREAD, or on any without it, is a line in $DISK_LOG. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int act(const char *path, const char *call, int writes)
{
    const char *disk = getenv("DISK"), *control = getenv("DISK_CONTROL"), *log = getenv("DISK_LOG");
    char text[64] = {0}, line[4200];
    double seconds = 0;
    int error = 0, file;
    if (!disk || !control || !log || !path || strncmp(path, disk, strlen(disk)))
        return 0;
    if ((file = REAL(open)(control, O_RDONLY)) < 0)
        return 0;
    if (REAL(read)(file, text, sizeof text - 1) > 0)
        sscanf(text, "%lf %d", &seconds, &error);
    close(file);
    snprintf(line, sizeof line, "%ld %s %s\n", syscall(SYS_gettid), call, path);
    if ((file = REAL(open)(log, O_WRONLY | O_APPEND | O_CREAT, 0600)) >= 0) {
        REAL(write)(file, line, strlen(line));
        close(file);
    }
    usleep((useconds_t)(seconds * 1e6));
    return writes ? error : 0;
}

static int act_on(int file, const char *call)
{
    char link[64], path[4096];
    ssize_t size;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    size = file < 3 ? -1 : readlink(link, path, sizeof path - 1);
    if (size <= 0)
        return 0;
    path[size] = 0;
    return act(path, call, 1);
}

#define FAIL(error) do { int code = (error); if (code) { errno = code; return -1; } } while (0)
#define OPEN(name) int name(const char *path, int flags, ...) { va_list rest; va_start(rest, flags); \
    mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    FAIL(act(path, "open", flags & (O_WRONLY | O_RDWR))); return REAL(name)(path, flags, mode); }
OPEN(open)
OPEN(open64)
int openat(int folder, const char *path, int flags, ...)
{
    char link[64], full[4200];
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (path[0] != '/' && folder >= 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, full, 4000);
        if (size > 0) {
            snprintf(full + size, sizeof full - size, "/%s", path);
            FAIL(act(full, "open", flags & (O_WRONLY | O_RDWR)));
        }
    } else
        FAIL(act(path, "open", flags & (O_WRONLY | O_RDWR)));
    return REAL(openat)(folder, path, flags, mode);
}
ssize_t write(int file, const void *data, size_t size) { FAIL(act_on(file, "write")); return REAL(write)(file, data, size); }
int fsync(int file) { FAIL(act_on(file, "fsync")); return REAL(fsync)(file); }
int rename(const char *from, const char *to) { FAIL(act(to, "rename", 1)); return REAL(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { FAIL(act(path, "mkdir", 1)); return REAL(mkdir)(path, mode); }
int unlink(const char *path) { FAIL(act(path, "unlink", 1)); return REAL(unlink)(path); }
int stat64(const char *path, struct stat64 *into) { FAIL(act(path, "stat", 0)); return REAL(stat64)(path, into); }
int stat(const char *path, struct stat *into) { FAIL(act(path, "stat", 0)); return REAL(stat)(path, into); }
int statvfs64(const char *path, struct statvfs64 *into) { FAIL(act(path, "statvfs", 0)); return REAL(statvfs64)(path, into); }
int statvfs(const char *path, struct statvfs *into) { FAIL(act(path, "statvfs", 0)); return REAL(statvfs)(path, into); }
