/* Records what a process does to the files of one folder, or lets one of its calls fail.
 *
 *   tracer PID FOLDER LOG                     records
 *   tracer PID FOLDER LOG CLASS N ERRNO ONCE  also fails the N-th call of CLASS (w r s m u)
 *
 * By ptrace, so that nothing slips by: calls made past libc, and the writes that a process puts
 * into the rings of io_uring, which are read from its memory when it submits them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 512, RINGS = 32, PATH = 4096 };

struct thread { pid_t tid; struct __ptrace_syscall_info entry; int in_call, failing; };
struct ring { int fd; uint64_t rings, sqes; struct io_uring_params params; };

static struct thread threads[THREADS];
static struct ring rings[RINGS];
static const char *folder;
static FILE *out;
static pid_t leader;
static char fault_class;
static long fault_at, fault_errno, seen;
static int fault_once;

static struct thread *thread_of(pid_t tid) {
    struct thread *spare = NULL;
    for (int at = 0; at < THREADS; at++) {
        if (threads[at].tid == tid) return &threads[at];
        if (!threads[at].tid && !spare) spare = &threads[at];
    }
    if (!spare) { fprintf(stderr, "too many threads\n"); exit(4); }
    memset(spare, 0, sizeof *spare);
    spare->tid = tid;
    return spare;
}

static size_t peek(uint64_t from, void *to, size_t len) {
    struct iovec here = {to, len}, there = {(void *)from, len};
    ssize_t got = process_vm_readv(leader, &here, 1, &there, 1, 0);
    return got < 0 ? 0 : (size_t)got;
}

static void peek_text(uint64_t from, char *to, size_t len) {
    /* A text may end just before a page that is not mapped: byte by byte is slow but safe. */
    for (size_t at = 0; at + 1 < len; at++) {
        if (peek(from + at, to + at, 1) != 1 || !to[at]) { to[at] = 0; return; }
    }
    to[len - 1] = 0;
}

static int is_ours(const char *path) {
    size_t len = strlen(folder);
    return !strncmp(path, folder, len) && (path[len] == '/' || !path[len]);
}

/* Path of a descriptor, and what it is; 0 when it is none of the folder. */
static int file_of(int fd, char *path, struct stat *stat_) {
    char link[64];
    snprintf(link, sizeof link, "/proc/%d/fd/%d", leader, fd);
    ssize_t len = readlink(link, path, PATH - 1);
    if (len < 0 || stat(link, stat_)) return 0;
    path[len] = 0;
    return is_ours(path);
}

static void path_at(int fd, uint64_t text, char *path) {
    char link[64], name[PATH];
    peek_text(text, name, sizeof name);
    if (name[0] == '/') { snprintf(path, PATH, "%s", name); return; }
    if (fd == AT_FDCWD) snprintf(link, sizeof link, "/proc/%d/cwd", leader);
    else snprintf(link, sizeof link, "/proc/%d/fd/%d", leader, fd);
    ssize_t len = readlink(link, path, PATH - 1);
    path[len < 0 ? 0 : len] = 0;
    strncat(path, "/", PATH - strlen(path) - 1);
    strncat(path, name, PATH - strlen(path) - 1);
}

/* One event: a letter, three numbers, and two byte strings. */
static void event(char what, uint64_t a, uint64_t b, uint64_t c, const void *one, uint32_t one_len,
                  const void *two, uint32_t two_len) {
    uint64_t numbers[3] = {a, b, c};
    uint32_t lens[2] = {one_len, two_len};
    fputc(what, out);
    fwrite(numbers, sizeof numbers, 1, out);
    fwrite(lens, sizeof lens, 1, out);
    fwrite(one, 1, one_len, out);
    fwrite(two, 1, two_len, out);
}

static void note_range(int fd, uint64_t offset, uint64_t len) {
    char path[PATH], link[64];
    struct stat stat_;
    if (!len || !file_of(fd, path, &stat_) || !S_ISREG(stat_.st_mode)) return;
    char *bytes = malloc(len);
    snprintf(link, sizeof link, "/proc/%d/fd/%d", leader, fd);
    int own = open(link, O_RDONLY);
    ssize_t got = own < 0 ? -1 : pread(own, bytes, len, (off_t)offset);
    if (own >= 0) close(own);
    if (got != (ssize_t)len) { fprintf(stderr, "cannot read back %s\n", path); exit(5); }
    event('W', stat_.st_ino, offset, len, bytes, (uint32_t)len, path, (uint32_t)strlen(path));
    free(bytes);
}

static uint64_t position(int fd) {
    char name[64], line[128];
    unsigned long long found = 0;
    snprintf(name, sizeof name, "/proc/%d/fdinfo/%d", leader, fd);
    FILE *info = fopen(name, "r");
    if (!info) return 0;
    while (fgets(line, sizeof line, info)) if (sscanf(line, "pos: %llu", &found) == 1) break;
    fclose(info);
    return found;
}

/* ---------------------------------------------------------------- rings */

static struct ring *ring_of(int fd) {
    for (int at = 0; at < RINGS; at++) if (rings[at].fd == fd && rings[at].params.sq_entries) return &rings[at];
    return NULL;
}

static void ring_made(int fd, uint64_t params) {
    for (int at = 0; at < RINGS; at++) {
        struct ring *ring = &rings[at];
        if (ring->params.sq_entries && ring->fd != fd) continue;
        memset(ring, 0, sizeof *ring);
        ring->fd = fd;
        peek(params, &ring->params, sizeof ring->params);
        return;
    }
    fprintf(stderr, "too many rings\n");
    exit(4);
}

static int wants(char class_) {
    if (class_ != fault_class) return 0;
    seen++;
    return fault_once ? seen == fault_at : seen >= fault_at;
}

static void ring_entered(int fd, unsigned to_submit) {
    struct ring *ring = ring_of(fd);
    if (!ring) return;
    uint32_t head = 0, tail = 0, mask = 0;
    peek(ring->rings + ring->params.sq_off.head, &head, 4);
    peek(ring->rings + ring->params.sq_off.tail, &tail, 4);
    peek(ring->rings + ring->params.sq_off.ring_mask, &mask, 4);
    for (unsigned at = 0; at < to_submit && head + at != tail; at++) {
        uint32_t slot = 0;
        struct io_uring_sqe sqe;
        peek(ring->rings + ring->params.sq_off.array + 4 * ((head + at) & mask), &slot, 4);
        uint64_t where = ring->sqes + sizeof sqe * (uint64_t)slot;
        if (peek(where, &sqe, sizeof sqe) != sizeof sqe) continue;
        char path[PATH];
        struct stat stat_;
        if (sqe.opcode != IORING_OP_WRITE && sqe.opcode != IORING_OP_READ) continue;
        if (!file_of(sqe.fd, path, &stat_)) continue;
        if (wants('u')) {
            int32_t nowhere = -1;
            struct iovec here = {&nowhere, 4}, there = {(void *)(where + 4), 4};
            process_vm_writev(leader, &here, 1, &there, 1, 0);
            event('F', seen, 0, EBADF, path, (uint32_t)strlen(path), "", 0);
            continue;
        }
        if (sqe.opcode != IORING_OP_WRITE) continue;
        char *bytes = malloc(sqe.len);
        if (peek(sqe.addr, bytes, sqe.len) != sqe.len) { fprintf(stderr, "short peek\n"); exit(5); }
        event('W', stat_.st_ino, sqe.off, sqe.len, bytes, sqe.len, path, (uint32_t)strlen(path));
        event('U', 0, 0, 0, "", 0, "", 0);
        free(bytes);
    }
}

/* ---------------------------------------------------------------- calls */

static void opened(int fd, uint64_t flags) {
    char path[PATH];
    struct stat stat_;
    if (!file_of(fd, path, &stat_) || !S_ISREG(stat_.st_mode)) return;
    event('O', stat_.st_ino, (flags & O_TRUNC) != 0, (flags & O_ACCMODE) != O_RDONLY, path,
          (uint32_t)strlen(path), "", 0);
}

static void two_paths(char what, int from_fd, uint64_t from, int to_fd, uint64_t to) {
    char one[PATH], two[PATH];
    path_at(from_fd, from, one);
    path_at(to_fd, to, two);
    if (is_ours(one) || is_ours(two))
        event(what, 0, 0, 0, one, (uint32_t)strlen(one), two, (uint32_t)strlen(two));
}

static void one_path(char what, int fd, uint64_t text) {
    char path[PATH];
    path_at(fd, text, path);
    if (is_ours(path)) event(what, 0, 0, 0, path, (uint32_t)strlen(path), "", 0);
}

static void synced(int fd) {
    char path[PATH];
    struct stat stat_;
    if (!file_of(fd, path, &stat_)) return;
    event('S', stat_.st_ino, S_ISDIR(stat_.st_mode), 0, path, (uint32_t)strlen(path), "", 0);
}

static void sized(char what, int fd, uint64_t offset, uint64_t len) {
    char path[PATH];
    struct stat stat_;
    if (file_of(fd, path, &stat_))
        event(what, stat_.st_ino, offset, len, path, (uint32_t)strlen(path), "", 0);
}

static void marked(int fd, uint64_t text, uint64_t len) {
    char link[64], path[PATH], bytes[4096];
    snprintf(link, sizeof link, "/proc/%d/fd/%d", leader, fd);
    ssize_t got = readlink(link, path, sizeof path - 1);
    if (got < 5 || strncmp(path, "pipe:", 5) || len > sizeof bytes) return;
    if (peek(text, bytes, len) == len && bytes[0] == '[') event('M', 0, 0, 0, bytes, (uint32_t)len, "", 0);
}

static void left(struct thread *thread, int64_t value) {
    const uint64_t *a = thread->entry.entry.args;
    int fd = (int)a[0];
    if (value < 0 && thread->entry.entry.nr != SYS_mmap) return;
    switch (thread->entry.entry.nr) {
    case SYS_openat: opened((int)value, a[2]); break;
#ifdef SYS_open
    case SYS_open: opened((int)value, a[1]); break;
    case SYS_rename: two_paths('R', AT_FDCWD, a[0], AT_FDCWD, a[1]); break;
    case SYS_unlink: one_path('X', AT_FDCWD, a[0]); break;
    case SYS_rmdir: one_path('Y', AT_FDCWD, a[0]); break;
    case SYS_mkdir: one_path('D', AT_FDCWD, a[0]); break;
    case SYS_link: two_paths('L', AT_FDCWD, a[0], AT_FDCWD, a[1]); break;
    case SYS_renameat: two_paths('R', fd, a[1], (int)a[2], a[3]); break;
#endif
    case SYS_renameat2: two_paths('R', fd, a[1], (int)a[2], a[3]); break;
    case SYS_linkat: two_paths('L', fd, a[1], (int)a[2], a[3]); break;
    case SYS_unlinkat: one_path(a[2] & AT_REMOVEDIR ? 'Y' : 'X', fd, a[1]); break;
    case SYS_mkdirat: one_path('D', fd, a[1]); break;
    case SYS_pwrite64: note_range(fd, a[3], (uint64_t)value); break;
    case SYS_write: marked(fd, a[1], (uint64_t)value); /* fall through */
    case SYS_writev: note_range(fd, position(fd) - (uint64_t)value, (uint64_t)value); break;
    case SYS_sendfile: note_range(fd, position(fd) - (uint64_t)value, (uint64_t)value); break;
    case SYS_splice:
    case SYS_copy_file_range: note_range((int)a[2], position((int)a[2]) - (uint64_t)value, (uint64_t)value); break;
    case SYS_fsync:
    case SYS_fdatasync: synced(fd); break;
    case SYS_ftruncate: sized('T', fd, 0, a[1]); break;
    case SYS_fallocate: sized(a[1] & FALLOC_FL_PUNCH_HOLE ? 'P' : (a[1] & FALLOC_FL_KEEP_SIZE ? 'K' : 'A'), fd, a[2], a[3]); break;
    case SYS_io_uring_setup: ring_made((int)value, a[1]); break;
    case SYS_mmap: {
        struct ring *ring = ring_of((int)a[4]);
        if (!ring || value == -1) break;
        if (a[5] == IORING_OFF_SQES) ring->sqes = (uint64_t)value;
        else if (a[5] == IORING_OFF_SQ_RING) ring->rings = (uint64_t)value;
        break;
    }
    default: break;
    }
}

/* Which class of faults a call belongs to; 0: none, or not of the folder. */
static char class_of(const struct __ptrace_syscall_info *info) {
    const uint64_t *a = info->entry.args;
    char path[PATH];
    struct stat stat_;
    switch (info->entry.nr) {
    case SYS_write: case SYS_writev: case SYS_pwrite64: case SYS_sendfile:
        return file_of((int)a[0], path, &stat_) ? 'w' : 0;
    case SYS_read: case SYS_pread64:
        return file_of((int)a[0], path, &stat_) ? 'r' : 0;
    case SYS_fsync: case SYS_fdatasync:
        return file_of((int)a[0], path, &stat_) ? 's' : 0;
    case SYS_ftruncate: case SYS_fallocate:
        return file_of((int)a[0], path, &stat_) ? 'm' : 0;
    case SYS_openat: case SYS_unlinkat: case SYS_renameat2: case SYS_linkat: case SYS_mkdirat:
        path_at((int)a[0], a[1], path);
        return is_ours(path) ? 'm' : 0;
#ifdef SYS_open
    case SYS_open: case SYS_rename: case SYS_unlink: case SYS_link: case SYS_mkdir:
        path_at(AT_FDCWD, a[0], path);
        return is_ours(path) ? 'm' : 0;
#endif
    default: return 0;
    }
}

static void set_call(pid_t tid, int is_exit, long value) {
#ifdef __x86_64__
    struct user_regs_struct regs;
    if (ptrace(PTRACE_GETREGS, tid, 0, &regs)) return;
    if (is_exit) regs.rax = (unsigned long long)value;
    else regs.orig_rax = (unsigned long long)value;
    ptrace(PTRACE_SETREGS, tid, 0, &regs);
#else
    (void)tid; (void)is_exit; (void)value;
#endif
}

static void stopped_in_call(struct thread *thread) {
    struct __ptrace_syscall_info info;
    if (ptrace(PTRACE_GET_SYSCALL_INFO, thread->tid, sizeof info, &info) <= 0) return;
    if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
        thread->entry = info;
        thread->in_call = 1;
        if (info.entry.nr == SYS_io_uring_enter) ring_entered((int)info.entry.args[0], (unsigned)info.entry.args[1]);
        if (fault_class && fault_class != 'u') {
            char class_ = class_of(&info);
            if (class_ && wants(class_)) {
                thread->failing = 1;
                event('F', (uint64_t)seen, info.entry.nr, (uint64_t)fault_errno, "", 0, "", 0);
                set_call(thread->tid, 0, -1);
            }
        }
    } else if (info.op == PTRACE_SYSCALL_INFO_EXIT && thread->in_call) {
        thread->in_call = 0;
        if (thread->failing) {
            thread->failing = 0;
            set_call(thread->tid, 1, -fault_errno);
        } else {
            left(thread, info.exit.rval);
        }
    }
}

int main(int count, char **given) {
    if (count != 4 && count != 8) return 2;
    leader = atoi(given[1]);
    folder = given[2];
    out = fopen(given[3], "wb");
    if (count == 8) {
        fault_class = given[4][0];
        fault_at = atol(given[5]);
        fault_errno = atol(given[6]);
        fault_once = atoi(given[7]);
    }
    long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
    if (!out || ptrace(PTRACE_SEIZE, leader, 0, options) || ptrace(PTRACE_INTERRUPT, leader, 0, 0)) {
        perror("tracer");
        return 3;
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        int status;
        pid_t tid = waitpid(-1, &status, __WALL);
        if (tid < 0) break;
        struct thread *thread = thread_of(tid);
        if (WIFEXITED(status) || WIFSIGNALED(status)) {
            thread->tid = 0;
            if (tid == leader) break;
            continue;
        }
        int signal_ = WSTOPSIG(status), what = status >> 16;
        if (signal_ == (SIGTRAP | 0x80)) { stopped_in_call(thread); signal_ = 0; }
        else if (what) signal_ = 0;
        ptrace(PTRACE_SYSCALL, tid, 0, signal_);
    }
    fclose(out);
    return 0;
}
