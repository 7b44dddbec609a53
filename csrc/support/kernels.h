// The CPU kernels of supports. Included once for each instruction set.
#include "decode_rows.h"
#include "project_rows.h"
