/* Prints the CPU it sees from everywhere a program can look: one line "place: vendor, brand, features". */
#define _GNU_SOURCE
#include <cpuid.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static sigjmp_buf back;
static int *volatile nowhere;

static void look(const char *place)
{
    unsigned id[4], brand[12], leaf7[4];

    __cpuid(0, id[0], id[1], id[3], id[2]);
    for (unsigned i = 0; i < 3; i++)
        __cpuid(0x80000002 + i, brand[4 * i], brand[4 * i + 1], brand[4 * i + 2], brand[4 * i + 3]);
    __cpuid_count(7, 0, leaf7[0], leaf7[1], leaf7[2], leaf7[3]);
    printf("%s: %.12s, %.48s,%s%s\n", place, (char *)&id[1], (char *)brand, leaf7[1] & bit_AVX2 ? " avx2" : "",
           leaf7[1] & bit_AVX512F ? " avx512f" : "");
    fflush(stdout);
}

static void *look_from_thread(void *place)
{
    look(place);
    return NULL;
}

static void *look_with_signals_blocked(void *place)
{
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    look(place);
    return NULL;
}

static void look_from_handler(int number)
{
    (void)number;
    look("own handler of a real segfault");
    siglongjmp(back, 1);
}

static void in_thread(void *(*body)(void *), const char *place)
{
    pthread_t thread;
    pthread_create(&thread, NULL, body, (void *)place);
    pthread_join(thread, NULL);
}

static void segfault(void)
{
    *nowhere = 1;
}

/* The same words, as /proc/cpuinfo has them for its first CPU. */
static void look_at_cpuinfo(void)
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[8192], vendor[64] = "", brand[64] = "";
    while (file && fgets(line, sizeof line, file)) {
        sscanf(line, "vendor_id : %63[^\n]", vendor);
        sscanf(line, "model name : %63[^\n]", brand);
        if (!strncmp(line, "flags", 5))
            break;
    }
    printf("/proc/cpuinfo: %s, %s,%s%s\n", vendor, brand, strstr(line, " avx2 ") ? " avx2" : "",
           strstr(line, " avx512f ") ? " avx512f" : "");
    fflush(stdout);
}

int main(int count, char **arguments)
{
    if (count > 1) {
        look(arguments[1]);
        return 0;
    }
    look("main");
    in_thread(look_from_thread, "thread");
    in_thread(look_with_signals_blocked, "thread with all signals blocked");
    look_at_cpuinfo();

    struct sigaction mine = {.sa_handler = look_from_handler};
    sigfillset(&mine.sa_mask);
    sigaction(SIGSEGV, &mine, NULL);
    if (!sigsetjmp(back, 1))
        segfault();
    look("after that segfault");

    if (!fork()) {
        look("fork");
        execl(arguments[0], arguments[0], "exec", NULL);
    }
    wait(NULL);

    signal(SIGSEGV, SIG_DFL);
    segfault();
}
