"""What `order: gain` earns: against level order and against engines without admission, in virtual time."""
