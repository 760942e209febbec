/* CPUID as the CPU being played answers it. Layouts: Intel SDM volume 2A, "CPUID"; AMD APM volume 3, appendix E. */
#include <string.h>

#include "cpuspoof.h"

enum { LINE = 64 }; /* bytes of a cache line */

const char *vendor_id(void)
{
    return cpu->vendor == AMD ? "AuthenticAMD" : "GenuineIntel";
}

/* Family, model and stepping as leaf 1 packs them. */
uint32_t signature(void)
{
    uint32_t base = cpu->family < 15 ? cpu->family : 15;
    return (cpu->family - base) << 20 | (cpu->model >> 4) << 16 | base << 8 | (cpu->model & 15) << 4 | cpu->stepping;
}

void real_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t r[4])
{
    __asm__ volatile("cpuid"
                     : "=a"(r[EAX]), "=b"(r[EBX]), "=c"(r[ECX]), "=d"(r[EDX])
                     : "a"(leaf), "c"(subleaf));
}

static void set(uint32_t r[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    r[EAX] = a, r[EBX] = b, r[ECX] = c, r[EDX] = d;
}

static void set_vendor(uint32_t r[4])
{
    const char *id = vendor_id();
    memcpy(&r[EBX], id, 4), memcpy(&r[EDX], id + 4, 4), memcpy(&r[ECX], id + 8, 4);
}

/* The caches, in the layout that Intel's leaf 4 and AMD's 0x8000001D share. */
static void set_cache(uint32_t subleaf, uint32_t r[4])
{
    enum { DATA = 1, CODE, UNIFIED, SELF_INITIALISING = 1 << 8 };
    const struct {
        uint32_t type, level, sharers;
        struct cache size;
    } all[] = {
        {DATA, 1, 1, cpu->l1d},
        {CODE, 1, 1, {32, 8}},
        {UNIFIED, 2, 1, cpu->l2},
        {UNIFIED, 3, 2, cpu->l3},
    }, *one;

    set(r, 0, 0, 0, 0);
    if (subleaf >= sizeof all / sizeof *all)
        return;
    one = &all[subleaf];
    r[EAX] = one->type | one->level << 5 | SELF_INITIALISING | (one->sharers - 1) << 14;
    r[EBX] = (LINE - 1) | (one->size.ways - 1) << 22;
    r[ECX] = one->size.kib * 1024 / LINE / one->size.ways - 1;
}

/* What XSAVE saves: up to AVX 832 bytes, up to AVX-512 2688. */
static void set_xsave(uint32_t subleaf, uint32_t r[4])
{
    int wide = cpu->has & AVX512;
    uint32_t states = wide ? 0xe7 : 0x07, bytes = wide ? 2688 : 832;

    if (subleaf == 0)
        set(r, r[EAX] & states, bytes, bytes, 0);
    else if (subleaf > 7 || (subleaf > 1 && !(states >> subleaf & 1)))
        set(r, 0, 0, 0, 0);
}

static void set_brand(uint32_t part, uint32_t r[4])
{
    char text[48] = "";
    memcpy(text, cpu->brand, strnlen(cpu->brand, sizeof text - 1));
    memcpy(r, text + 16 * part, 16);
}

static void hide_features(uint32_t leaf, uint32_t subleaf, uint32_t r[4])
{
    if (leaf == 1)
        subleaf = 0; /* leaf 1 has no subleaves: ECX may hold anything */
    for (const struct feature *f = FEATURES; f->flag; f++)
        if (f->leaf == leaf && f->subleaf == subleaf && !(cpu->has & f->group))
            r[f->reg] &= ~(1u << f->bit);
}

static void spoof_basic(uint32_t leaf, uint32_t subleaf, uint32_t top, uint32_t r[4])
{
    int amd = cpu->vendor == AMD;
    uint32_t limit = amd ? 0x10 : cpu->has & AVX512 ? 0x1f : 0x16;

    if (top > limit)
        top = limit;
    hide_features(leaf, subleaf, r);
    if (leaf == 0) {
        r[EAX] = top;
        set_vendor(r);
    } else if (leaf > top || (amd && (leaf == 2 || leaf == 4)) || (leaf == 7 && subleaf > 1)) {
        set(r, 0, 0, 0, 0);
    } else if (leaf == 1) {
        r[EAX] = signature();
        r[EBX] = (r[EBX] & 0xff00ffff) | 2 << 16; /* two logical CPUs in the package */
    } else if (leaf == 2) {
        set(r, 0x00feff01, 0xf0, 0, 0); /* descriptor 0xff: "ask leaf 4" */
    } else if (leaf == 4) {
        set_cache(subleaf, r);
    } else if (leaf == 0xd) {
        set_xsave(subleaf, r);
    }
}

static void spoof_extended(uint32_t leaf, uint32_t subleaf, uint32_t r[4])
{
    enum { TOPOEXT = 1 << 22 }; /* leaf 0x8000001D exists */
    const uint32_t tlb = 0xff40ff40, one_line = 1 << 8 | LINE;
    int amd = cpu->vendor == AMD;

    if (leaf == 0x80000000) {
        set(r, amd ? 0x80000021 : 0x80000008, 0, 0, 0);
        if (amd)
            set_vendor(r);
    } else if (leaf == 0x80000001) {
        r[ECX] |= amd ? TOPOEXT : 0;
    } else if (leaf >= 0x80000002 && leaf <= 0x80000004) {
        set_brand(leaf - 0x80000002, r);
    } else if (leaf == 0x80000005 && amd) {
        set(r, tlb, tlb, cpu->l1d.kib << 24 | cpu->l1d.ways << 16 | one_line, 32u << 24 | 8 << 16 | one_line);
    } else if (leaf == 0x80000006) { /* associativity codes: 6 for 8 ways, 9 for "see 0x8000001D"; L3 in 512 KiB */
        r[ECX] = cpu->l2.kib << 16 | 6 << 12 | one_line;
        r[EDX] = amd ? cpu->l3.kib / 512 << 18 | 9 << 12 | one_line : 0;
    } else if (leaf == 0x8000001d && amd) {
        set_cache(subleaf, r);
    } else if (leaf > 0x80000008) {
        set(r, 0, 0, 0, 0);
    }
}

/* Turns `r`, the silicon's answer to (leaf, subleaf), into the played CPU's.
 * `top`: the silicon's highest basic leaf. */
void spoof_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t top, uint32_t r[4])
{
    if (leaf >= 0x80000000)
        spoof_extended(leaf, subleaf, r);
    else if (leaf < 0x40000000) /* beyond: the hypervisor's */
        spoof_basic(leaf, subleaf, top, r);
}
