#define ZP_ISA baseline
#if defined(__aarch64__)
#define ZP_ISA_NAME "neon"
#else
#define ZP_ISA_NAME "baseline"
#endif
#include "body.inc"
