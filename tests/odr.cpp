// Includes everything a second time in each test program: what is defined twice does not link.
#include <pulseinfer/pulseinfer.hpp>
