/* What the parts of cpuspoof share. Build with -fvisibility=hidden: only EXPORTED names meet the program's own. */
#ifndef CPUSPOOF_H
#define CPUSPOOF_H
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

enum vendor { INTEL, AMD };

/* Features come in the groups in which CPU generations brought them. */
enum group {
    AVX2 = 1 << 0,       /* Haswell: AVX2, FMA, BMI */
    AVX512 = 1 << 1,     /* Skylake-X: F, CD, BW, DQ, VL */
    AVX512_ICX = 1 << 2, /* Ice Lake: IFMA, VBMI, VNNI, ... */
    BF16 = 1 << 3,       /* AVX512_BF16 */
    FP16 = 1 << 4,       /* AVX512_FP16 */
    AVX_VNNI = 1 << 5,   /* VNNI without AVX-512 */
    NEVER = 1 << 6,      /* in no profile: too rare for a profile to promise */
};

struct cache {
    unsigned kib, ways;
};

/* A CPU that can be played. */
struct profile {
    const char *name, *brand;
    enum vendor vendor;
    unsigned family, model, stepping;
    unsigned has; /* groups, or-ed */
    struct cache l1d, l2, l3;
};

enum { EAX, EBX, ECX, EDX };

/* A CPUID bit that a profile may lack: where it stands, and its word in /proc/cpuinfo. */
struct feature {
    uint32_t leaf, subleaf;
    int reg, bit;
    enum group group;
    const char *flag;
};

extern const struct profile PROFILES[]; /* ends with a row without name */
extern const struct feature FEATURES[]; /* ends with a row without flag */

extern const struct profile *cpu; /* the CPU being played; NULL: none */

const char *vendor_id(void);
uint32_t signature(void);
void real_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t r[4]);
void spoof_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t top, uint32_t r[4]);

#endif
