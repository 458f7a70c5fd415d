/* Load and run networks that TVM has compiled, from C and C++.
 *
 * Needs the files beside this one: the network's library, TVM's runtime libraries and, to
 * compile, the headers below include/. CMakeLists.txt shows how to build.
 */
#ifndef TVM_ADAPTIVE_H_
#define TVM_ADAPTIVE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TVM_ADAPTIVE_MAX_DIMS 16

/* An input or output. Its values lie in memory one after the other, last dimension fastest. */
typedef struct {
  const char *name;
  const char *dtype; /* as NumPy names it, e.g. "float32" */
  int n_dims;
  int64_t shape[TVM_ADAPTIVE_MAX_DIMS];
  size_t n_bytes;
} tvm_adaptive_tensor;

/* An instruction set, and where the processor says that it has it. */
typedef struct {
  const char *name; /* as LLVM names it, e.g. "avx512f" */
  uint32_t leaf;    /* x86: of CPUID; Arm: AT_HWCAP or AT_HWCAP2 */
  uint32_t subleaf;
  int reg; /* 0 to 3: EAX, EBX, ECX, EDX */
  int bit;
  uint32_t xcr0; /* x86: registers that the operating system must save */
} tvm_adaptive_cpu_feature;

/* What a network takes, returns and needs: see NAME_model.h. */
typedef struct {
  const char *library; /* name of the file */
  int n_threads;       /* with which it is fastest */
  int n_inputs, n_outputs;
  const tvm_adaptive_tensor *inputs, *outputs;
  int n_cpu_features;
  const tvm_adaptive_cpu_feature *cpu_features;
} tvm_adaptive_description;

/* A loaded network. Only one thread may use it at a time; several may be loaded. */
typedef struct tvm_adaptive_model tvm_adaptive_model;

/* Load a network from the path of its library; it must stay loaded with its description.
 *
 * n_threads: number of threads, the calling one included, and at most the processors that this
 * process may use; 0: the fastest number. Each thread that runs networks has threads of its
 * own; how many is decided once, by its first call. They may run on all processors of the
 * process. The call sets the environment variable TVM_THREAD_POOL_SPIN_COUNT unless it is set,
 * so make it before other threads read the environment. After a fork, a thread that had loaded
 * a network cannot run one.
 *
 * Returns NULL on failure, also if this processor lacks an instruction set that is needed, or if
 * another library was loaded from the same path and is in use.
 */
tvm_adaptive_model *tvm_adaptive_load(const tvm_adaptive_description *description,
                                      const char *library, int n_threads);

/* Run one inference.
 *
 * inputs, outputs: a pointer to the values of each, in the order of the description. They are
 * copied, and need no alignment. Returns 0, or -1 on failure.
 */
int tvm_adaptive_run(tvm_adaptive_model *model, const void *const *inputs, void *const *outputs);

/* Number of threads that run the network. */
int tvm_adaptive_n_threads(const tvm_adaptive_model *model);

/* Why the last call of this thread that failed did so. */
const char *tvm_adaptive_error(void);

/* Free a network; NULL is allowed. */
void tvm_adaptive_free(tvm_adaptive_model *model);

#ifdef __cplusplus
}
#endif

#endif /* TVM_ADAPTIVE_H_ */
