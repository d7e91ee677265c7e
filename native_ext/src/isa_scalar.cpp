#define ZP_SCALAR
#define ZP_ISA scalar
#define ZP_ISA_NAME "scalar"
#include "body.inc"
