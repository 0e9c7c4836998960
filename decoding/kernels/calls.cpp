// Consecutive calls of the code that inductor compiles, made without going back to Python in between.
//
// A program is a list of calls: the address of the entry, the numbers of inputs and outputs, then the slots of both. Slots hold
// handles of tensors: first constants, which are borrowed, then the tensors given, then what the calls return. An input `~slot` is
// the last use of its slot. An output of -1 is not used.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <vector>

namespace {

// The entry of compiled code: it steals its inputs, and the caller owns its outputs.
using Entry = void (*)(AtenTensorHandle* inputs, AtenTensorHandle* outputs);

class Slots {
 public:
  Slots(int64_t size, const AtenTensorHandle* constants, int64_t num_constants, const AtenTensorHandle* given, int64_t num_given)
      : handles_(size, nullptr), num_constants_(num_constants) {
    std::memcpy(handles_.data(), constants, num_constants * sizeof(AtenTensorHandle));
    std::memcpy(handles_.data() + num_constants, given, num_given * sizeof(AtenTensorHandle));
  }

  ~Slots() {
    for (size_t slot = num_constants_; slot < handles_.size(); ++slot)
      if (handles_[slot] != nullptr) aoti_torch_delete_tensor_object(handles_[slot]);
  }

  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  AtenTensorHandle another(int64_t slot) const {
    AtenTensorHandle copy;
    if (aoti_torch_new_tensor_handle(handles_[slot], &copy)) throw std::runtime_error("a tensor has no further handle");
    return copy;
  }

  AtenTensorHandle take(int64_t slot) {
    AtenTensorHandle taken = handles_[slot];
    handles_[slot] = nullptr;
    return taken;
  }

  void put(int64_t slot, AtenTensorHandle handle) {
    if (slot < 0) {
      aoti_torch_delete_tensor_object(handle);
    } else {
      handles_[slot] = handle;
    }
  }

 private:
  std::vector<AtenTensorHandle> handles_;
  size_t num_constants_;
};

}  // namespace

// Runs `program` and hands over the handles of the slots in `returned`. The handles in `given` are stolen. Returns 0, or 1 with what
// went wrong in `message`. The caller holds Python's lock.
extern "C" __attribute__((visibility("default"))) int64_t sdtune_play(
    const int64_t* program, int64_t num_calls, int64_t num_slots, const AtenTensorHandle* constants, int64_t num_constants,
    const AtenTensorHandle* given, int64_t num_given, const int64_t* returned, int64_t num_returned, AtenTensorHandle* results,
    char* message, int64_t message_size) {
  try {
    Slots slots(num_slots, constants, num_constants, given, num_given);
    std::vector<AtenTensorHandle> inputs, outputs;
    for (int64_t call = 0; call < num_calls; ++call) {
      const auto entry = reinterpret_cast<Entry>(*program++);
      inputs.resize(*program++);
      outputs.assign(*program++, nullptr);
      for (auto& input : inputs) {
        const int64_t slot = *program++;
        input = slot < 0 ? slots.take(~slot) : slots.another(slot);
      }
      entry(inputs.data(), outputs.data());
      for (AtenTensorHandle output : outputs) slots.put(*program++, output);
    }
    for (int64_t index = 0; index < num_returned; ++index) results[index] = slots.take(returned[index]);
    return 0;
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), message_size - 1);
    message[message_size - 1] = 0;
    return 1;
  }
}
