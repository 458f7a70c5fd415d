/* Implements tvm_adaptive.h with the C API of TVM's runtime. */
#define _GNU_SOURCE /* of sched_getaffinity */
#include "tvm_adaptive.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

enum {
  kAlignment = 64, /* TVM's kernels read vectors from memory that begins on a cache line. */
  kPooledAllocator = 2
};

/* A loaded file. The system loads it once, and its kernels look up what they call by one pointer
 * in it: a second module of it would leave that pointer behind when it is freed. */
typedef struct loaded_file {
  char *path;
  dev_t device;
  ino_t inode;
  int n_models;
  TVMFFIAny module;
  struct loaded_file *next;
} loaded_file;

static loaded_file *files;
static pthread_mutex_t files_lock = PTHREAD_MUTEX_INITIALIZER;

struct tvm_adaptive_model {
  const tvm_adaptive_description *description;
  int n_threads;
  loaded_file *file;
  TVMFFIAny machine, run; /* run: the machine's function main */
  TVMFFIAny *inputs;               /* tensors whose memory each run reads */
};

/* Errors */

static _Thread_local char error_text[1024];

static int fail(const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(error_text, sizeof error_text, format, values);
  va_end(values);
  return -1;
}

const char *tvm_adaptive_error(void) { return error_text; }

/* What lies in an object of TVM behind its header. */
static void *content_of(TVMFFIObjectHandle object) { return (char *)object + sizeof(TVMFFIObject); }

static void release(TVMFFIAny *value) {
  if (value->type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectDecRef(value->v_obj);
  memset(value, 0, sizeof *value);
}

static int fail_as_tvm(const char *action) {
  TVMFFIObjectHandle error = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == NULL) return fail("%s: TVM gives no reason", action);
  const TVMFFIByteArray *message = &((TVMFFIErrorCell *)content_of(error))->message;
  fail("%s: %.*s", action, (int)message->size, message->data);
  TVMFFIObjectDecRef(error);
  return -1;
}

/* Calls of TVM's functions */

static TVMFFIAny of_int(int64_t number) {
  TVMFFIAny value = {.type_index = kTVMFFIInt};
  value.v_int64 = number;
  return value;
}

static TVMFFIAny of_text(const char *text) {
  TVMFFIAny value = {.type_index = kTVMFFIRawStr};
  value.v_c_str = text;
  return value;
}

static int call(const TVMFFIAny *function, TVMFFIAny *args, int n_args, TVMFFIAny *result,
                const char *action) {
  memset(result, 0, sizeof *result);
  if (TVMFFIFunctionCall(function->v_obj, args, n_args, result) != 0) return fail_as_tvm(action);
  return 0;
}

static int call_global(const char *name, TVMFFIAny *args, int n_args, TVMFFIAny *result,
                       const char *action) {
  TVMFFIByteArray key = {name, strlen(name)};
  TVMFFIAny function = {.type_index = kTVMFFIFunction};
  TVMFFIObjectHandle found = NULL;
  if (TVMFFIFunctionGetGlobal(&key, &found) != 0 || found == NULL)
    return fail("%s: TVM's runtime has no function %s", action, name);
  function.v_obj = found;
  int status = call(&function, args, n_args, result, action);
  release(&function);
  return status;
}

static int function_of(const TVMFFIAny *module, const char *name, TVMFFIAny *function) {
  TVMFFIAny args[] = {*module, of_text(name), {.type_index = kTVMFFIBool}};
  if (call_global("ffi.ModuleGetFunction", args, 3, function, name) != 0) return -1;
  if (function->type_index != kTVMFFIFunction) return fail("The library has no function %s", name);
  return 0;
}

static int call_module(const TVMFFIAny *module, const char *name, TVMFFIAny *args, int n_args,
                       TVMFFIAny *result, const char *action) {
  TVMFFIAny function = {0};
  int status = function_of(module, name, &function);
  if (status == 0) status = call(&function, args, n_args, result, action);
  release(&function);
  return status;
}

/* The processor */

static int has_feature(const tvm_adaptive_cpu_feature *feature) {
#if defined(__x86_64__)
  unsigned int regs[4] = {0}, xcr0 = 0, high = 0;
  const unsigned int os_saves_registers = 1u << 27; /* OSXSAVE of leaf 1, ECX */
  if (feature->xcr0 != 0) {
    if (!__get_cpuid(1, &regs[0], &regs[1], &regs[2], &regs[3])) return 0;
    if (!(regs[2] & os_saves_registers)) return 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if ((xcr0 & feature->xcr0) != feature->xcr0) return 0;
  }
  if (!__get_cpuid_count(feature->leaf, feature->subleaf, &regs[0], &regs[1], &regs[2], &regs[3]))
    return 0;
  return regs[feature->reg] >> feature->bit & 1;
#elif defined(__aarch64__)
  return getauxval(feature->leaf) >> feature->bit & 1;
#else
  (void)feature;
  return 1;
#endif
}

static int check_processor(const tvm_adaptive_description *description) {
  char missing[512] = "";
  for (int i = 0; i < description->n_cpu_features; ++i) {
    const char *name = description->cpu_features[i].name;
    if (has_feature(&description->cpu_features[i])) continue;
    if (strlen(missing) + strlen(name) + 2 > sizeof missing) break;
    strcat(strcat(missing, " "), name);
  }
  if (missing[0] == '\0') return 0;
  return fail("%s cannot run on this processor, which lacks%s; compile it for this one",
              description->library, missing);
}

/* Threads */

/* The process in which this thread's pool was made; 0 without one. */
static _Thread_local pid_t pool_owner;

/* TVM's names of processors, and room for them. */
typedef struct {
  char texts[CPU_SETSIZE][12];
  TVMFFIAny names[CPU_SETSIZE];
  int n;
} processor_list;

/* A container or taskset may leave a process some of the processors only. */
static void list_processors(processor_list *list) {
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof usable, &usable) != 0) /* there are more than it has room for */
    memset(&usable, 0xff, sizeof usable);
  list->n = 0;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (!CPU_ISSET(i, &usable)) continue;
    snprintf(list->texts[list->n], sizeof list->texts[0], "%d", i);
    list->names[list->n] = of_text(list->texts[list->n]);
    ++list->n;
  }
}

/* Let this thread's pool use n_threads of its threads, on the first n_names processors. */
static int configure_pool(processor_list *list, int n_names, int n_threads) {
  enum { kShareAllProcessors = -3 }; /* kSpecifyThreadShareAllCore of threading_backend.h */
  const char *action = "Threads could not be started";
  TVMFFIAny names = {0}, ignored = {0};
  if (call_global("ffi.Array", list->names, n_names, &names, action) != 0) return -1;
  TVMFFIAny args[] = {of_int(kShareAllProcessors), of_int(n_threads), names};
  int status = call_global("runtime.config_threadpool", args, 3, &ignored, action);
  release(&names);
  return status;
}

/* Make this thread's pool unless it has one. TVM on its own would bind the pools of all threads,
 * and the threads that call it, to the same first processors of the machine. */
static int start_threads(int n_threads) {
  processor_list list;
  if (pool_owner == getpid()) return 0;
  if (pool_owner != 0)
    return fail("This process was forked from one that had loaded a network in this thread, and "
                "has none of its threads; load networks after the fork");
  list_processors(&list);
  if (n_threads > list.n) n_threads = list.n;
  /* Threads wait 4 ms for the next inference before they sleep. By default they take 0.1 to 1 s
   * of the processors after each one, from whatever else runs there. */
  setenv("TVM_THREAD_POOL_SPIN_COUNT", "10000", 0);
  /* The first call makes as many threads as it names processors; the second frees them. */
  if (configure_pool(&list, n_threads, n_threads) != 0 ||
      configure_pool(&list, list.n, n_threads) != 0)
    return -1;
  pool_owner = getpid();
  return 0;
}

/* Inputs and outputs */

static void delete_input(DLManagedTensor *tensor) {
  free(tensor->dl_tensor.data);
  free(tensor);
}

static int new_input(const tvm_adaptive_tensor *info, TVMFFIAny *input) {
  TVMFFIByteArray dtype = {info->dtype, strlen(info->dtype)};
  size_t n_lines = (info->n_bytes + kAlignment - 1) / kAlignment + 1;
  DLManagedTensor *tensor = calloc(1, sizeof *tensor);
  void *data = aligned_alloc(kAlignment, n_lines * kAlignment);
  TVMFFIObjectHandle made = NULL;
  if (tensor == NULL || data == NULL) {
    free(tensor);
    free(data);
    return fail("There is no memory for input %s", info->name);
  }
  tensor->deleter = delete_input;
  tensor->dl_tensor.data = data;
  tensor->dl_tensor.device.device_type = kDLCPU;
  tensor->dl_tensor.ndim = info->n_dims;
  tensor->dl_tensor.shape = (int64_t *)info->shape; /* only read */
  if (TVMFFIDataTypeFromString(&dtype, &tensor->dl_tensor.dtype) != 0 ||
      TVMFFITensorFromDLPack(tensor, kAlignment, 1, &made) != 0) {
    delete_input(tensor);
    return fail_as_tvm(info->name);
  }
  input->type_index = kTVMFFITensor;
  input->v_obj = made;
  return 0;
}

static int copy_output(const tvm_adaptive_tensor *info, const TVMFFIAny *output, void *to) {
  if (output->type_index != kTVMFFITensor) return fail("Output %s is no tensor", info->name);
  const DLTensor *tensor = content_of(output->v_obj);
  size_t n_bytes = (size_t)(tensor->dtype.bits + 7) / 8 * tensor->dtype.lanes;
  for (int i = 0; i < tensor->ndim; ++i) n_bytes *= (size_t)tensor->shape[i];
  if (n_bytes != info->n_bytes)
    return fail("Output %s has %zu bytes instead of %zu", info->name, n_bytes, info->n_bytes);
  memcpy(to, (const char *)tensor->data + tensor->byte_offset, n_bytes);
  return 0;
}

static int copy_outputs(const tvm_adaptive_description *description, const TVMFFIAny *result,
                        void *const *outputs) {
  const TVMFFIAny *each = result;
  int n_outputs = 1;
  if (result->type_index == kTVMFFIArray) {
    const TVMFFISeqCell *array = content_of(result->v_obj);
    each = array->data;
    n_outputs = (int)array->size;
  }
  if (n_outputs != description->n_outputs)
    return fail("The library has %d outputs instead of %d", n_outputs, description->n_outputs);
  for (int i = 0; i < n_outputs; ++i)
    if (copy_output(&description->outputs[i], &each[i], outputs[i]) != 0) return -1;
  return 0;
}

/* The file of a network */

/* Find or load a file; the lock is held. */
static loaded_file *find_or_load(const char *path) {
  struct stat found;
  /* The system would search a name without a slash elsewhere. */
  char *whole = realpath(path, NULL);
  if (whole == NULL || stat(whole, &found) != 0) {
    fail("%s: %s", path, strerror(errno));
    free(whole);
    return NULL;
  }
  for (loaded_file *each = files; each != NULL; each = each->next) {
    int is_same = each->device == found.st_dev && each->inode == found.st_ino;
    /* The system knows what is loaded by its path. */
    if (!is_same && strcmp(each->path, whole) != 0) continue;
    if (!is_same)
      fail("%s was replaced while a network of it is loaded; free that one first", path);
    free(whole);
    return is_same ? each : NULL;
  }
  loaded_file *file = calloc(1, sizeof *file);
  /* TVM takes the ending for the kind of a file: a link to net.so.1 is loaded by its own name. */
  size_t length = strlen(whole);
  int is_named = length > 3 && strcmp(whole + length - 3, ".so") == 0;
  TVMFFIAny name = of_text(is_named ? whole : path);
  if (file == NULL) {
    fail("There is no memory for %s", path);
  } else if (call_global("ffi.ModuleLoadFromFile", &name, 1, &file->module, path) == 0) {
    file->path = whole;
    file->device = found.st_dev;
    file->inode = found.st_ino;
    file->next = files;
    files = file;
    return file;
  }
  free(file);
  free(whole);
  return NULL;
}

static loaded_file *open_file(const char *path) {
  pthread_mutex_lock(&files_lock);
  loaded_file *file = find_or_load(path);
  if (file != NULL) ++file->n_models;
  pthread_mutex_unlock(&files_lock);
  return file;
}

static void close_file(loaded_file *file) {
  if (file == NULL) return;
  pthread_mutex_lock(&files_lock);
  if (--file->n_models == 0) {
    loaded_file **place = &files;
    while (*place != file) place = &(*place)->next;
    *place = file->next;
    release(&file->module);
    free(file->path);
    free(file);
  }
  pthread_mutex_unlock(&files_lock);
}

/* The network */

static int check_runtime(void) {
  TVMFFIVersion found;
  TVMFFIGetVersion(&found);
  if (found.major == TVM_FFI_VERSION_MAJOR && found.minor == TVM_FFI_VERSION_MINOR) return 0;
  return fail("libtvm_ffi.so is version %u.%u but this was compiled for %d.%d", found.major,
              found.minor, TVM_FFI_VERSION_MAJOR, TVM_FFI_VERSION_MINOR);
}

static int load(tvm_adaptive_model *model, const char *path, int n_threads) {
  const tvm_adaptive_description *description = model->description;
  TVMFFIAny ignored = {0}, number = {0};
  TVMFFIAny on_cpu[] = {of_int(kDLCPU), of_int(0), of_int(kPooledAllocator)};
  if (check_processor(description) != 0 || check_runtime() != 0) return -1;
  if (start_threads(n_threads > 0 ? n_threads : description->n_threads) != 0 ||
      call_global("runtime.NumThreads", NULL, 0, &number, "Threads could not be started") != 0)
    return -1;
  model->n_threads = (int)number.v_int64;
  model->file = open_file(path);
  if (model->file == NULL ||
      call_module(&model->file->module, "vm_load_executable", NULL, 0, &model->machine, path) != 0 ||
      call_module(&model->machine, "vm_initialization", on_cpu, 3, &ignored, path) != 0)
    return -1;
  release(&ignored);
  if (function_of(&model->machine, "main", &model->run) != 0) return -1;
  model->inputs = calloc((size_t)description->n_inputs + 1, sizeof *model->inputs);
  if (model->inputs == NULL) return fail("There is no memory for the inputs");
  for (int i = 0; i < description->n_inputs; ++i)
    if (new_input(&description->inputs[i], &model->inputs[i]) != 0) return -1;
  return 0;
}

tvm_adaptive_model *tvm_adaptive_load(const tvm_adaptive_description *description,
                                      const char *library, int n_threads) {
  tvm_adaptive_model *model = calloc(1, sizeof *model);
  if (model == NULL) {
    fail("There is no memory for the network");
    return NULL;
  }
  model->description = description;
  if (load(model, library, n_threads) == 0) return model;
  tvm_adaptive_free(model);
  return NULL;
}

int tvm_adaptive_run(tvm_adaptive_model *model, const void *const *inputs, void *const *outputs) {
  const tvm_adaptive_description *description = model->description;
  TVMFFIAny result = {0};
  if (start_threads(model->n_threads) != 0) return -1;
  for (int i = 0; i < description->n_inputs; ++i) {
    const DLTensor *tensor = content_of(model->inputs[i].v_obj);
    memcpy(tensor->data, inputs[i], description->inputs[i].n_bytes);
  }
  int status = call(&model->run, model->inputs, description->n_inputs, &result, "The network failed");
  if (status == 0) status = copy_outputs(description, &result, outputs);
  release(&result);
  return status;
}

int tvm_adaptive_n_threads(const tvm_adaptive_model *model) { return model->n_threads; }

void tvm_adaptive_free(tvm_adaptive_model *model) {
  if (model == NULL) return;
  for (int i = 0; model->inputs != NULL && i < model->description->n_inputs; ++i)
    release(&model->inputs[i]);
  free(model->inputs);
  release(&model->run);
  release(&model->machine);
  close_file(model->file);
  free(model);
}
