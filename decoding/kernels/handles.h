// Tensors as the code that inductor compiles hands them over: handles of torch's C interface. Needs `lanes.h`.

#define SDTUNE_CHECK(call) \
  if (auto error = (call)) return error

namespace {

// Allocate the outputs [.., rows] of contiguous values [.., inputs].
AOTITorchError allocate(AtenTensorHandle values, int64_t rows, AtenTensorHandle* outputs, int64_t* positions, int64_t* inputs,
                        Precision* precision) {
  int64_t dims, *sizes, new_sizes[8], strides[8];
  int32_t dtype;
  SDTUNE_CHECK(aoti_torch_get_dim(values, &dims));
  SDTUNE_CHECK(aoti_torch_get_sizes(values, &sizes));
  SDTUNE_CHECK(aoti_torch_get_dtype(values, &dtype));
  if (dims < 1 || dims > 8) return AOTI_TORCH_FAILURE;
  int64_t stride = 1;
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    new_sizes[dim] = dim == dims - 1 ? rows : sizes[dim];
    strides[dim] = stride;
    stride *= new_sizes[dim];
  }
  *positions = rows ? stride / rows : 0, *inputs = sizes[dims - 1], *precision = precision_of(dtype);
  return aoti_torch_empty_strided(dims, new_sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, outputs);
}

template <int N>
AOTITorchError addresses(const AtenTensorHandle (&tensors)[N], void* (&data)[N]) {
  for (int i = 0; i < N; ++i) SDTUNE_CHECK(aoti_torch_get_data_ptr(tensors[i], &data[i]));
  return AOTI_TORCH_SUCCESS;
}

}  // namespace
