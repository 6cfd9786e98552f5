// Everything a generated kernel includes; precompiled once per set of flags.
#pragma once
#include "core.h"
#include "cuda.h"
#include "types.h"
#include "tl.h"
#include "async.h"
#include "mma.h"
