// Report: NVIDIA/TensorRT-LLM#13124. A block id where a slot is wanted must not compile.
#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/store/slot_pool.hpp>

using namespace pulseinfer;

status give_back(slot_pool<archetype::backend>& pool, block_id block, slot_id slot)
{
  static_cast<void>(block);
#ifndef PULSEINFER_COMPILE_FAIL_CONTROL
  static_cast<void>(pool.release(layer_id{0}, block));  // expect-error: block_id
#endif
  return pool.release(layer_id{0}, slot);
}
