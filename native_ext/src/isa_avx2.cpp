#define ZP_ISA avx2
#define ZP_ISA_NAME "avx2"
#include "body.inc"
