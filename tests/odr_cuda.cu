// Includes everything a second time in each GPU test program: what is defined twice does not link.
#include <pulseinfer/pulseinfer.cuh>
