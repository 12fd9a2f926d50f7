// Found before CUDA's own when kernels are compiled for the host.
#pragma once
#include "host.h"
