// Everything a generated kernel includes; precompiled once per set of flags.
#pragma once
#include "core.h"
#include "cuda.h"
#include "types.h"
#include "tl.h"
#include "async.h"
#include "mma.h"

// <cmath> has these names too, with another rule for NaN.
#define fmaxf emu::max_num<float, float>
#define fminf emu::min_num<float, float>
#define fmax emu::max_num
#define fmin emu::min_num
