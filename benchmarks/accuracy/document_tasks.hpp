/// Tasks on documents for several threads. A document's state serves one task at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace accuracy {

class document_tasks {
 public:
  /// @param of_task [tasks] each task's document, below `documents`
  document_tasks(std::vector<std::size_t> of_task, std::size_t documents)
    : document_of_{std::move(of_task)}, taken_(document_of_.size()), busy_(documents)
  {}

  /// The first task that nobody has and whose document is free, if there is one now.
  [[nodiscard]] std::optional<std::size_t> try_take()
  {
    std::lock_guard const lock{mutex_};
    return find();
  }
  /// The same, and waits for a document to become free; nothing once all tasks are taken.
  [[nodiscard]] std::optional<std::size_t> take()
  {
    std::unique_lock lock{mutex_};
    std::optional<std::size_t> found;
    changed_.wait(lock, [&] {
      found = find();
      return found.has_value() || left_ == 0;
    });
    return found;
  }
  /// A task that was taken is over; its document is free again.
  void give_back(std::size_t task)
  {
    {
      std::lock_guard const lock{mutex_};
      busy_[document_of_[task]] = false;
    }
    changed_.notify_all();
  }

 private:
  std::optional<std::size_t> find()
  {
    for (std::size_t task = 0; task < taken_.size(); ++task) {
      if (taken_[task] || busy_[document_of_[task]]) { continue; }
      taken_[task] = busy_[document_of_[task]] = true;
      --left_;
      return task;
    }
    return std::nullopt;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::size_t> document_of_;
  std::vector<bool> taken_, busy_;  // [tasks], [documents]
  std::size_t left_ = taken_.size();
};

}  // namespace accuracy
