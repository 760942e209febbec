/* SIGSEGV is ours; the program's own handler for it is kept behind. */
#ifndef SIGNALS_H
#define SIGNALS_H
#include <signal.h>
#include <ucontext.h>

void take_sigsegv(void (*handler)(int, siginfo_t *, void *));

/* A SIGSEGV that is no CPUID: does with it what the program asked for. */
void pass_to_program(int number, siginfo_t *info, ucontext_t *context);

#endif
