#include <pulseinfer/pulseinfer.hpp>

#include <iostream>

int main() { std::cout << "pulseinfer " << pulseinfer::version_string << '\n'; }
