/* /proc/cpuinfo of the CPU being played, for programs that open it by that path. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cpuspoof.h"

static const char CPUINFO[] = "/proc/cpuinfo";

typedef FILE *fopen_function(const char *, const char *);
typedef int openat_function(int, const char *, int, ...);

static FILE *real_fopen(const char *path, const char *mode)
{
    static fopen_function *found;
    if (!found)
        found = (fopen_function *)dlsym(RTLD_NEXT, "fopen");
    return found(path, mode);
}

static int is_hidden(const char *flag)
{
    for (const struct feature *f = FEATURES; f->flag; f++)
        if (!strcmp(f->flag, flag))
            return !(cpu->has & f->group);
    return 0;
}

static void write_flags(FILE *out, char *flags)
{
    for (char *rest, *flag = strtok_r(flags, " \n", &rest); flag; flag = strtok_r(NULL, " \n", &rest))
        if (!is_hidden(flag))
            fprintf(out, " %s", flag);
    fputc('\n', out);
}

/* Writes one "key<tabs>: value" line, with the played CPU's value where it has one. */
static void write_line(FILE *out, char *line)
{
    const struct {
        const char *key, *text;
        unsigned number; /* where there is no text */
    } values[] = {
        {"vendor_id", vendor_id(), 0},    {"model name", cpu->brand, 0},     {"cpu family", NULL, cpu->family},
        {"model", NULL, cpu->model},      {"stepping", NULL, cpu->stepping}, {NULL, NULL, 0},
    }, *v = values;
    char key[32] = "", *colon = strchr(line, ':');

    if (colon)
        snprintf(key, sizeof key, "%.*s", (int)strcspn(line, "\t:"), line);
    while (v->key && strcmp(v->key, key))
        v++;
    if (!v->key && strcmp(key, "flags")) {
        fputs(line, out);
        return;
    }
    fprintf(out, "%.*s", (int)(colon + 1 - line), line);
    if (!v->key)
        write_flags(out, colon + 1);
    else if (v->text)
        fprintf(out, " %s\n", v->text);
    else
        fprintf(out, " %u\n", v->number);
}

/* A file descriptor of the rewritten copy, at its start; -1 on failure. */
static int open_copy(int flags)
{
    int copy = memfd_create("cpuinfo", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
    FILE *in = real_fopen(CPUINFO, "re"), *out = fdopen(dup(copy), "w");
    char *line = NULL;
    size_t room = 0;

    while (in && out && getline(&line, &room, in) > 0)
        write_line(out, line);
    free(line);
    if (in)
        fclose(in);
    if (out)
        fclose(out);
    lseek(copy, 0, SEEK_SET);
    return copy;
}

static int is_cpuinfo(const char *path)
{
    return cpu && path && !strcmp(path, CPUINFO);
}

static int open_any(int folder, const char *path, int flags, va_list rest)
{
    static openat_function *real;

    if (is_cpuinfo(path))
        return open_copy(flags);
    if (!real)
        real = (openat_function *)dlsym(RTLD_NEXT, "openat");
    return real(folder, path, flags, va_arg(rest, mode_t)); /* garbage where the caller gave no mode; unused then */
}

EXPORTED int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    int fd = open_any(AT_FDCWD, path, flags, rest);
    va_end(rest);
    return fd;
}

EXPORTED int openat(int folder, const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    int fd = open_any(folder, path, flags, rest);
    va_end(rest);
    return fd;
}

EXPORTED FILE *fopen(const char *path, const char *mode)
{
    return is_cpuinfo(path) ? fdopen(open_copy(O_CLOEXEC), "r") : real_fopen(path, mode);
}

/* On x86-64 the 64-bit names are the same functions. */
EXPORTED int open64(const char *, int, ...) __attribute__((alias("open")));
EXPORTED int openat64(int, const char *, int, ...) __attribute__((alias("openat")));
EXPORTED FILE *fopen64(const char *, const char *) __attribute__((alias("fopen")));
