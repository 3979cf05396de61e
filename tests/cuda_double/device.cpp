// One CUDA device in a CPU build of torch: enough for tensors without memory (FakeTensorMode), autograd and autocast.
// There is one device with one stream, events are always done, and nothing can be allocated or launched.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

namespace {

const Device device(c10::DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, device);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);

}  // namespace

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
};

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
