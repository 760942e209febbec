/* Keeps our SIGSEGV handler in place, and SIGSEGV unblocked, whatever the program does with signals. */
#define _GNU_SOURCE
#include "signals.h"

#include <dlfcn.h>
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpuspoof.h"

typedef int sigaction_function(int, const struct sigaction *, struct sigaction *);
typedef int sigmask_function(int, const sigset_t *, sigset_t *);

static struct sigaction program_action; /* what the program wants done with its SIGSEGVs */

static sigaction_function *real_sigaction(void)
{
    static sigaction_function *found;
    if (!found)
        found = (sigaction_function *)dlsym(RTLD_NEXT, "sigaction");
    return found;
}

void take_sigsegv(void (*handler)(int, siginfo_t *, void *))
{
    struct sigaction ours = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigfillset(&ours.sa_mask); /* no other handler may run while CPUID is real */
    real_sigaction()(SIGSEGV, &ours, &program_action);
}

static void die_of(int number, int sent)
{
    struct sigaction deadly = {.sa_handler = SIG_DFL};
    real_sigaction()(number, &deadly, NULL);
    if (sent)
        raise(number); /* else: the faulting instruction runs again on return, for the last time */
}

void pass_to_program(int number, siginfo_t *info, ucontext_t *context)
{
    struct sigaction wanted = program_action;
    int sent = info->si_code <= 0; /* by kill(), not by an instruction */
    sigset_t mask;

    if (wanted.sa_handler == SIG_IGN && sent)
        return;
    if (wanted.sa_handler == SIG_DFL || wanted.sa_handler == SIG_IGN) {
        die_of(number, sent);
        return;
    }
    if ((unsigned)wanted.sa_flags & SA_RESETHAND)
        program_action = (struct sigaction){.sa_handler = SIG_DFL};
    sigorset(&mask, &context->uc_sigmask, &wanted.sa_mask);
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &mask, NULL, _NSIG / 8);
    if (wanted.sa_flags & SA_SIGINFO)
        wanted.sa_sigaction(number, info, context);
    else
        wanted.sa_handler(number);
}

/* `set` without SIGSEGV: a CPUID that faults while it is blocked would kill. */
static const sigset_t *without_sigsegv(const sigset_t *set, sigset_t *room)
{
    if (!cpu || !set)
        return set;
    *room = *set;
    sigdelset(room, SIGSEGV);
    return room;
}

EXPORTED int sigaction(int number, const struct sigaction *wanted, struct sigaction *before)
{
    struct sigaction allowed;

    if (wanted) {
        allowed = *wanted;
        allowed.sa_mask = *without_sigsegv(&wanted->sa_mask, &allowed.sa_mask);
        wanted = &allowed;
    }
    if (!cpu || number != SIGSEGV)
        return real_sigaction()(number, wanted, before);
    allowed = wanted ? *wanted : program_action;
    if (before)
        *before = program_action;
    program_action = allowed;
    return 0;
}

EXPORTED sighandler_t signal(int number, sighandler_t handler)
{
    struct sigaction wanted = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    return sigaction(number, &wanted, &before) ? SIG_ERR : before.sa_handler;
}

/* Returns 0 or an errno value, as POSIX has it; sigprocmask returns -1 and sets errno. */
EXPORTED int pthread_sigmask(int how, const sigset_t *wanted, sigset_t *before)
{
    static sigmask_function *real;
    sigset_t room;

    if (!real)
        real = (sigmask_function *)dlsym(RTLD_NEXT, "pthread_sigmask");
    return real(how, how == SIG_UNBLOCK ? wanted : without_sigsegv(wanted, &room), before);
}

EXPORTED int sigprocmask(int how, const sigset_t *wanted, sigset_t *before)
{
    int failure = pthread_sigmask(how, wanted, before);
    if (failure)
        errno = failure;
    return failure ? -1 : 0;
}
