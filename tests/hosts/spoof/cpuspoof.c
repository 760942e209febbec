/* Makes one x86-64 Linux machine look like another CPU to a program.
 *
 *   cc -O2 -Wall -Wextra -shared -fPIC -fvisibility=hidden -Wl,-z,initfirst -o cpuspoof.so *.c
 *   LD_PRELOAD=$PWD/cpuspoof.so CPUSPOOF=zen2 python -c '...'
 *
 * The kernel faults every CPUID instruction (arch_prctl ARCH_SET_CPUID) and the handler here answers it from the
 * table in profiles.c; /proc/cpuinfo is rewritten to match. Threads and forks inherit the fault, an exec'd program
 * gets this library again through LD_PRELOAD. Without CPUSPOOF nothing happens.
 *
 * Exit 2: no such profile. Exit 3: this machine cannot play it. A program never runs unspoofed by mistake.
 *
 * What stays real: the silicon that runs the instructions (so RCPPS and RSQRTPS do not vary), XGETBV, the CPUID that
 * libc read before any library started, statically linked programs.
 */
#define _GNU_SOURCE
#include "cpuspoof.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "signals.h"

#ifndef ARCH_SET_CPUID
#define ARCH_SET_CPUID 0x1012
#endif

const struct profile *cpu;

static volatile sig_atomic_t answered; /* has a CPUID been spoofed yet? */

/* Sets whether this thread's CPUID faults; returns 0, or -1 with errno. The kernel keeps it for each thread. */
static long fault_cpuid(int faults)
{
    return syscall(SYS_arch_prctl, ARCH_SET_CPUID, !faults);
}

static int is_cpuid_fault(const siginfo_t *info, const greg_t *regs)
{
    enum { GENERAL_PROTECTION = 13 };
    const uint8_t *code = (const uint8_t *)regs[REG_RIP];
    int refused = info->si_code == SI_KERNEL && regs[REG_TRAPNO] == GENERAL_PROTECTION;
    return refused && code[0] == 0x0f && code[1] == 0xa2;
}

static void on_sigsegv(int number, siginfo_t *info, void *opaque)
{
    ucontext_t *context = opaque;
    greg_t *regs = context->uc_mcontext.gregs;

    if (!is_cpuid_fault(info, regs)) {
        pass_to_program(number, info, context);
        return;
    }
    uint32_t leaf = (uint32_t)regs[REG_RAX], subleaf = (uint32_t)regs[REG_RCX], top[4], r[4];
    fault_cpuid(0);
    real_cpuid(0, 0, top);
    real_cpuid(leaf, subleaf, r);
    fault_cpuid(1);
    spoof_cpuid(leaf, subleaf, top[EAX], r);
    regs[REG_RAX] = r[EAX], regs[REG_RBX] = r[EBX], regs[REG_RCX] = r[ECX], regs[REG_RDX] = r[EDX];
    regs[REG_RIP] += 2;
    answered = 1;
}

static const struct profile *find_profile(const char *name)
{
    const struct profile *p = PROFILES;
    while (p->name && strcmp(p->name, name))
        p++;
    if (p->name)
        return p;
    dprintf(2, "cpuspoof: no CPU profile \"%s\"; known:", name);
    for (p = PROFILES; p->name; p++)
        dprintf(2, " %s", p->name);
    dprintf(2, "\n");
    _exit(2);
}

/* Features can be hidden, not added: what the profile has, the silicon must have. */
static void require_features(void)
{
    for (const struct feature *f = FEATURES; f->flag; f++) {
        uint32_t r[4];
        real_cpuid(f->leaf, f->subleaf, r);
        if (cpu->has & f->group && !(r[f->reg] >> f->bit & 1)) {
            dprintf(2, "cpuspoof: profile %s needs %s, which this machine's CPU lacks\n", cpu->name, f->flag);
            _exit(3);
        }
    }
}

static void require_fault(void)
{
    uint32_t r[4];
    if (fault_cpuid(1)) {
        dprintf(2, "cpuspoof: this CPU or kernel cannot fault CPUID (ARCH_SET_CPUID: %s)\n", strerror(errno));
        _exit(3);
    }
    real_cpuid(1, 0, r);
    if (!answered || r[EAX] != signature()) {
        dprintf(2, "cpuspoof: this kernel accepts ARCH_SET_CPUID, but CPUID does not fault\n");
        _exit(3);
    }
}

/* Reads envp, not getenv(): linked with -z initfirst this runs before libc has set `environ`. */
__attribute__((constructor)) static void start(int argc, char **argv, char **envp)
{
    static const char VARIABLE[] = "CPUSPOOF=";
    (void)argc, (void)argv;

    while (*envp && strncmp(*envp, VARIABLE, strlen(VARIABLE)))
        envp++;
    if (!*envp)
        return;
    cpu = find_profile(*envp + strlen(VARIABLE));
    require_features();
    take_sigsegv(on_sigsegv);
    require_fault();
}
