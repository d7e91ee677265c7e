#define ZP_ISA avx512
#define ZP_ISA_NAME "avx512"
#include "body.inc"
